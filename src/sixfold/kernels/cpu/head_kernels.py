"""CPU kernels of the output head: `head.c`, called through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .engine_kernels import load_library, set_types

SOURCE = Path(__file__).with_name("head.c")


class HeadKernels:
    """Typed calls into the compiled library.

    A tile is a [rows, columns] float32 tensor: logits of consecutive tokens of the vocabulary,
    starting with token `first`. It may be a part of a larger table.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        tile = (pointer, *[integer] * 4, pointer)
        self._fold = set_types(library.fold, *tile, pointer, pointer, threads)
        self._gradient = set_types(library.logit_gradient, *tile, pointer, pointer, threads)

    def fold(
        self,
        tile: Tensor,
        first: int,
        targets: Tensor,
        stats: Tensor,
        factors: Tensor | None = None,
    ) -> None:
        """Add a tile of logits z to the statistics of its rows.

        Args:
            tile: logits.
            first: token of the first column.
            targets: [rows] chosen tokens.
            stats: [rows, 4] maximum m, sum of e^(z - m), sum of (z - m) e^(z - m), and the logit of
                the chosen token. They begin as -inf, 0, 0 and 0.
            factors: [rows]; receives e^(old maximum - new maximum), by which older sums must be
                multiplied. The tile is then overwritten by e^(z - m). None: neither is done.
        """
        kept = None if factors is None else factors.data_ptr()
        self._fold(*_tile(tile, first, targets), stats.data_ptr(), kept, torch.get_num_threads())

    def gradient(
        self, tile: Tensor, first: int, targets: Tensor, norms: Tensor, gains: Tensor
    ) -> None:
        """Replace a tile of logits z by gains · ([token = target] - e^(z - norms)).

        Args:
            tile: logits; overwritten.
            first: token of the first column.
            targets: [rows] chosen tokens.
            norms: [rows] logsumexp over the whole vocabulary.
            gains: [rows] gradients of the log-probs of the chosen tokens.
        """
        inputs = (norms.data_ptr(), gains.data_ptr(), torch.get_num_threads())
        self._gradient(*_tile(tile, first, targets), *inputs)


def _tile(tile: Tensor, first: int, targets: Tensor) -> tuple[int, ...]:
    rows, columns = tile.shape
    return tile.data_ptr(), tile.stride(0), rows, columns, first, targets.data_ptr()


@cache
def head_kernels() -> HeadKernels | None:
    """The compiled kernels, or None if they are not available."""
    library = load_library(SOURCE)
    return None if library is None else HeadKernels(library)
