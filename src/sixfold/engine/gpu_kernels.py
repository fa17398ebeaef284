"""Whether the kernels of `triton_kernels.py` serve a device. Triton comes with PyTorch's CUDA builds; the base install has none."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def triton_serves(device: str) -> bool:
    """device: a torch device's type."""
    return device == "cuda" and find_spec("triton") is not None
