"""Block tables as arrays, and the table of a batch that decodes, which only grows while it runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .sequence import Sequence

Shape = Callable[[int, int], tuple[int, int]]
"""(rows, columns) that are needed -> those that a table has."""


def block_table(tables: list[list[int]], shape: tuple[int, int], scratch: int) -> np.ndarray:
    """One row of blocks for each sequence, in an array of `shape` that holds `scratch` elsewhere."""
    made = np.full(shape, scratch, dtype=np.int64)
    for row, blocks in zip(made, tables, strict=False):
        row[: len(blocks)] = blocks
    return made


class DecodeTable:
    """The block table of the sequences that decode together.

    While the same sequences run, their tables only get new blocks at the end. So the array is
    filled once for a batch and then appended to; what was derived from its first columns (which
    sequences share a prefix) stays true as long as `key` stays the same.
    """

    def __init__(self, scratch: int) -> None:
        """scratch: the block that padding writes to."""
        self._scratch = scratch
        self._batch: list[Sequence] = []
        self._lists: list[list[int]] = []
        self._counts: list[int] = []
        self._asked = (-1, -1)
        self.key: object = None
        self.array = np.zeros((0, 0), dtype=np.int64)

    def update(self, batch: list[Sequence], revision: int, rows: int, shape: Shape) -> np.ndarray:
        """Bring the table to the present.

        Args:
            batch: the sequences; the same list object for as long as they stay the same.
            revision: changes whenever a sequence's blocks do.
            rows: rows needed, those of padding included.
            shape: see `Shape`. (Not kept: it is a method of the table's owner, and a cycle would
                keep the memory of an engine that nobody uses.)

        Returns:
            [rows or more, columns] blocks; the same array while nothing changed.
        """
        if batch is self._batch and self._asked == (revision, rows):
            return self.array
        if not (batch is self._batch and self._asked[1] == rows and self._appended(shape)):
            self._batch, self._lists = batch, [s.blocks for s in batch]
            self.array = block_table(self._lists, shape(rows, max(map(len, self._lists))), self._scratch)
            self._counts = list(map(len, self._lists))
            self.key = object()
        self._asked = (revision, rows)
        return self.array

    def _appended(self, shape: Shape) -> bool:
        """Write what the sequences' lists got at their ends; False if they changed otherwise."""
        counts = [len(s.blocks) for s in self._batch]
        for s, known, before, now in zip(self._batch, self._lists, self._counts, counts, strict=True):
            # A preempted sequence comes back with another list of blocks.
            if s.blocks is not known or now < before:
                return False
        columns = shape(self._asked[1], max(counts))[1]
        if columns > self.array.shape[1]:
            more = columns - self.array.shape[1]
            self.array = np.pad(self.array, ((0, 0), (0, more)), constant_values=self._scratch)
        for row, (s, before, now) in enumerate(zip(self._batch, self._counts, counts, strict=True)):
            if now > before:
                self.array[row, before:now] = s.blocks[before:now]
        self._counts = counts
        return True
