"""Contract of a prefix cache, which finds the blocks that hold an already computed prefix.

Every implementation promises:

- Ownership: it owns each cached block once, through `BlockManager.keep`. So a block outlives the
  sequence that filled it.
- Lookup: `match` does not take ownership. The caller must share the blocks before anything else can
  evict them.
- Context: keys and values depend on all earlier tokens and on the adapter. So a block is found only
  after the same tokens, and only in the same `space` (a number) that it was inserted in.
- Eviction: it evicts only blocks that no one else owns, least recently used first. Within one
  sequence, later blocks go before earlier ones.
- Versions: its contents belong to one version of the weights. The engine clears it when weights
  change.

Whole blocks are cached and evicted. A match may still end within a block (`Prefix.length`). The
caller then copies that block instead of sharing it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prefix:
    """Result of a lookup: `blocks` hold the first `length` tokens, in order.

    If `length` is not a multiple of the block size, the last block may hold other tokens after the
    prefix. That block must be copied, never shared.
    """

    blocks: list[int]
    length: int


class PrefixCache(Protocol):
    """Finds cached prefixes. The module docstring states what an implementation promises."""

    def match(self, tokens: Sequence[int], space: int = 0, avoid: Container[int] = ()) -> Prefix:
        """Find the longest prefix of `tokens` cached in the space, and mark it as used now.

        It does not end within a block to avoid.
        """

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Cache `blocks`, which hold `tokens`. Parts that are already cached keep their old blocks.

        `blocks` has as many entries as the tokens need.
        """

    def findable(self, count: int) -> int:
        """How many of `count` inserted tokens a match finds."""

    def evict(self, count: int) -> None:
        """Free `count` idle blocks, or all idle blocks if there are fewer."""

    def clear(self) -> None:
        """Release every block."""


class NoCache:
    """Prefix cache that caches nothing."""

    def match(self, tokens: Sequence[int], space: int = 0, avoid: Container[int] = ()) -> Prefix:
        """Returns the empty prefix."""
        return Prefix([], 0)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Does nothing."""

    def findable(self, count: int) -> int:
        """Returns 0."""
        return 0

    def evict(self, count: int) -> None:
        """Does nothing: the cache owns no blocks."""

    def clear(self) -> None:
        """Does nothing: the cache owns no blocks to release."""
