"""Block tables as arrays, and the growing block table of a decoding batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .sequence import Sequence

Shape = Callable[[int, int], tuple[int, int]]
"""Maps the (rows, columns) that are needed to the shape of the table."""


def block_table(tables: list[list[int]], shape: tuple[int, int], scratch: int) -> np.ndarray:
    """Array of `shape` with the blocks of each sequence in its row, filled up with `scratch`."""
    made = np.full(shape, scratch, dtype=np.int64)
    for row, blocks in zip(made, tables, strict=False):
        row[: len(blocks)] = blocks
    return made


class DecodeTable:
    """Block table of the sequences that decode together.

    While the same sequences run, their tables only get new blocks at the end. So the array is
    filled once per batch and then appended to. Results derived from its first columns, such as
    shared prefixes, stay valid while `key` stays the same object.
    """

    def __init__(self, scratch: int) -> None:
        """Create an empty table. scratch: the block that padding rows write to."""
        self._scratch = scratch
        self._batch: list[Sequence] = []
        self._lists: list[list[int]] = []
        self._counts: list[int] = []
        self._shape_key = (-1, -1)
        self.key: object = None
        self.array = np.zeros((0, 0), dtype=np.int64)

    def update(self, batch: list[Sequence], revision: int, rows: int, shape: Shape) -> np.ndarray:
        """Update the table.

        Args:
            batch: the sequences; the same list object while the batch stays the same.
            revision: changes whenever a sequence's blocks change.
            rows: number of rows needed, including padding.
            shape: see `Shape`. It is not stored: it is a method of the table's owner, and the
                reference cycle would keep the memory of a discarded engine alive.

        Returns:
            Blocks [rows or more, columns]; the same array while nothing changes.
        """
        if batch is self._batch and self._shape_key == (revision, rows):
            return self.array
        if not (batch is self._batch and self._shape_key[1] == rows and self._append_blocks(shape)):
            self._batch, self._lists = batch, [s.blocks for s in batch]
            self.array = block_table(
                self._lists, shape(rows, max(map(len, self._lists))), self._scratch
            )
            self._counts = list(map(len, self._lists))
            self.key = object()
        self._shape_key = (revision, rows)
        return self.array

    def _append_blocks(self, shape: Shape) -> bool:
        """Append new blocks of the sequences to the array.

        Returns:
            False if a block list changed in any other way.
        """
        counts = [len(s.blocks) for s in self._batch]
        for s, known, before, now in zip(
            self._batch, self._lists, self._counts, counts, strict=True
        ):
            # A preempted sequence resumes with a new list of blocks.
            if s.blocks is not known or now < before:
                return False
        columns = shape(self._shape_key[1], max(counts))[1]
        if columns > self.array.shape[1]:
            more = columns - self.array.shape[1]
            self.array = np.pad(self.array, ((0, 0), (0, more)), constant_values=self._scratch)
        for row, (s, before, now) in enumerate(zip(self._batch, self._counts, counts, strict=True)):
            if now > before:
                self.array[row, before:now] = s.blocks[before:now]
        self._counts = counts
        return True
