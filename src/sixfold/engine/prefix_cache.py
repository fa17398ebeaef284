"""The contract of a prefix cache: which blocks hold which tokens, so that what was computed once is not computed again.

What every implementation promises:

- It owns each block it remembers (once, through `BlockManager.keep`), so a block outlives the sequence that filled it.
- `match` finds; it takes nothing. The caller shares the blocks before anything else can evict them.
- The keys and values of a token depend on all tokens before it, so a block is found only behind the very tokens it was computed behind; and on the
  adapter, so only in the `space` (a number) that it was inserted in.
- It evicts only blocks that it alone owns, those used least recently first, and the later part of a text before the earlier one.
- Its contents belong to one version of the weights: the engine clears it when weights change.

Granularity is the block: what is remembered and evicted is whole blocks. A match may end within a block all the same (`Prefix.length`); the taker
then copies that block instead of sharing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .block_manager import BlockManager


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens are in `blocks`, in order. If length is no multiple of the block size, the last block holds other tokens behind, or
    may: it is to be copied, never to be shared."""

    blocks: list[int]
    length: int


class PrefixCache(Protocol):
    """See the module's docstring for what each method owes to the others."""

    def match(self, tokens: Sequence[int], space: int = 0) -> Prefix:
        """The longest prefix of `tokens` that is remembered in the space; it counts as used now."""

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Remember that `blocks` hold `tokens` (as many blocks as they need). What is known already stays where it is."""

    def evict(self, count: int) -> None:
        """Free `count` idle blocks, or all there are if they are fewer."""

    def clear(self) -> None:
        """Give up every block."""


class NoCache:
    """Remembers nothing."""

    def match(self, tokens: Sequence[int], space: int = 0) -> Prefix:
        """Nothing is ever found."""
        return Prefix([], 0)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Nothing is kept."""

    def evict(self, count: int) -> None:
        """There is nothing to evict."""

    def clear(self) -> None:
        """There is nothing to give up."""


def make_prefix_cache(kind: str, blocks: BlockManager) -> PrefixCache:
    """kind: none, radix or hash. Raises ValueError for another."""
    from .block_hash_cache import BlockHashCache
    from .radix_cache import RadixCache

    kinds: dict[str, Callable[[BlockManager], PrefixCache]] = {"none": lambda _: NoCache(), "radix": RadixCache, "hash": BlockHashCache}
    if kind not in kinds:
        raise ValueError(f"unknown prefix cache '{kind}': none, radix or hash")
    return kinds[kind](blocks)
