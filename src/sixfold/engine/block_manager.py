"""Ownership of the KV cache's blocks.

A block is a fixed number of token slots. A sequence's block table maps position // block_size to a
block.

Invariants: a block is either free or has at least one owner. A full block with several owners is
never written again. The prefix cache counts as one owner. A block that only the prefix cache owns
is idle.
"""

from __future__ import annotations


class BlockManager:
    """Free list and reference counts of `count` blocks. Every operation takes O(1) per block."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.idle = 0
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._cached = [False] * count

    @property
    def free(self) -> int:
        """Number of blocks without an owner."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks with an owner other than the prefix cache."""
        return self.count - len(self._free) - self.idle

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one owner each.

        Raises:
            RuntimeError: if fewer blocks are free. The scheduler must check before it allocates.
        """
        if count > len(self._free):
            raise RuntimeError(
                f"KV cache: {count} blocks requested, but only {len(self._free)} of {self.count}"
                " are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add an owner to each block."""
        for block in blocks:
            self.idle -= self.is_idle(block)
            self._owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove an owner from each block. A block without owners becomes free.

        Raises:
            RuntimeError: if a block has no owner.
        """
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise RuntimeError(
                    f"KV cache: block {block} was released more often than it was shared"
                )
            if self._owners[block] == 0:
                self._free.append(block)
            self.idle += self.is_idle(block)

    def keep(self, blocks: list[int]) -> None:
        """Add the prefix cache as an owner of each block."""
        for block in blocks:
            self._owners[block] += 1
            self._cached[block] = True

    def forget(self, blocks: list[int]) -> None:
        """Remove the prefix cache as an owner of each block."""
        for block in blocks:
            self.idle -= self.is_idle(block)
            self._cached[block] = False
        self.release(blocks)

    def is_idle(self, block: int) -> bool:
        """True if only the prefix cache owns the block, so it can be evicted."""
        return self._cached[block] and self._owners[block] == 1
