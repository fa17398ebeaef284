"""float64 on both sides: what a peer makes without naming a dtype is then no rounder than its
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def float64_by_default() -> Iterator[None]:
    """Tensors made without a dtype are float64 inside a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
