"""Prefix cache by block hashes: a full block is found by a hash of its tokens and all tokens
before.

The hash of a block covers its own tokens and the hash of the block before it. Kwon et al. 2023,
"Efficient memory management for large language model serving with PagedAttention", and vLLM's
automatic prefix caching.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, takewhile

from .block_manager import BlockManager
from .prefix_cache import Prefix
from .weight_stages import stage


class BlockHashCache:
    """Prefix cache of full blocks.

    The hash chain starts from the space and the number of times that the cache was cleared. So a
    hash never matches a block that was computed with older weights.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._epoch = 0
        self._block_of: OrderedDict[bytes, int] = OrderedDict()
        """Hash -> block, least recently used first; within one sequence, later blocks first."""

    def match(self, tokens: Sequence[int], space: int = 0, avoid: Container[int] = ()) -> Prefix:
        """Find the longest cached prefix in full blocks, and mark it as used now."""
        known = list(takewhile(self._block_of.__contains__, self._chain(tokens, space)))
        self._touch(known)
        return Prefix(
            [self._block_of[digest] for digest in known], len(known) * self._blocks.block_size
        )

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Cache the full blocks of `tokens`. Tokens that are already cached keep their blocks."""
        chain = list(self._chain(tokens, space))
        for digest, block in zip(chain, blocks, strict=False):
            if digest not in self._block_of:
                self._blocks.keep([block])
                self._block_of[digest] = block
        self._touch(chain)

    def findable(self, count: int) -> int:
        return count - count % self._blocks.block_size

    def evict(self, count: int) -> None:
        idle = (digest for digest, block in self._block_of.items() if self._blocks.is_idle(block))
        chosen = list(islice(idle, min(count, self._blocks.idle)))
        self._blocks.forget([self._block_of.pop(digest) for digest in chosen])

    @stage("invalidate")
    def clear(self) -> None:
        self._blocks.forget(list(self._block_of.values()))
        self._block_of.clear()
        self._epoch += 1

    def _chain(self, tokens: Sequence[int], space: int) -> Iterator[bytes]:
        """Hash of each full block, over its own tokens and the previous hash."""
        size = self._blocks.block_size
        digest = self._epoch.to_bytes(8, "little") + space.to_bytes(8, "little")
        for i in range(0, len(tokens) - size + 1, size):
            digest = blake2b(
                digest + array("q", tokens[i : i + size]).tobytes(), digest_size=16
            ).digest()
            yield digest

    def _touch(self, chain: list[bytes]) -> None:
        for digest in reversed(chain):
            self._block_of.move_to_end(digest)
