"""Who owns which block of the KV cache. Blocks are fixed-size runs of token slots; a sequence's table maps position // block_size to a block.

Invariants: a block is free or has at least one owner, never both; a full block shared by several owners is never written again. The prefix cache
is one owner among others; a block that it alone owns is idle.
"""

from __future__ import annotations


class BlockManager:
    """Free list and reference counts over `count` blocks; every operation is O(1) a block."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.idle = 0
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._cached = [False] * count

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that someone other than the prefix cache owns."""
        return self.count - len(self._free) - self.idle

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises RuntimeError when there are too few: admission should have prevented it."""
        if count > len(self._free):
            raise RuntimeError(f"KV cache: {count} blocks wanted, {len(self._free)} of {self.count} free")
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
        """Remove an owner from each block; the last one to go frees it."""
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise RuntimeError(f"KV cache: block {block} released more often than owned")
            if self._owners[block] == 0:
                self._free.append(block)
            self.idle += self.is_idle(block)

    def keep(self, blocks: list[int]) -> None:
        """Make the prefix cache an owner of each block, besides the one who hands it over."""
        for block in blocks:
            self._owners[block] += 1
            self._cached[block] = True

    def forget(self, blocks: list[int]) -> None:
        """The prefix cache owns these no longer."""
        for block in blocks:
            self.idle -= self.is_idle(block)
            self._cached[block] = False
        self.release(blocks)

    def is_idle(self, block: int) -> bool:
        """True when the prefix cache alone owns the block: nobody would miss it."""
        return self._cached[block] and self._owners[block] == 1
