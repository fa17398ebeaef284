"""CPU kernels that round weights to int8 or fp8: `round.c`, called through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .engine_kernels import load_library, set_types

SOURCE = Path(__file__).with_name("round.c")


class RoundKernels:
    """Typed calls into the compiled library. Scale, cast and product are fused."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        matrix = (pointer, pointer, integer, integer, ctypes.c_int)
        self._forms = {
            "int8": set_types(library.round_int8, *matrix),
            "fp8": set_types(library.round_fp8, *matrix),
        }

    def rounded(self, w: Tensor, form: Literal["int8", "fp8"]) -> Tensor:
        """Values of the matrix after quantisation, as a new tensor.

        Args:
            w: [rows, columns] contiguous float32 matrix in host memory.
            form: int8 has one scale per row, fp8 (e4m3) one for the matrix.
        """
        made = torch.empty_like(w)
        shape = (*w.shape, torch.get_num_threads())
        self._forms[form](w.data_ptr(), made.data_ptr(), *shape)
        return made


@cache
def round_kernels() -> RoundKernels | None:
    """The compiled kernels, or None if they are not available."""
    library = load_library(SOURCE)
    return None if library is None else RoundKernels(library)
