"""Weights in shared memory: one process changes them in place, another reads them without a
copy.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Mapping
from typing import IO, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment in bytes, that of torch's own tensors. Matrix products may round differently for data
with another alignment.
"""

_TYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


class Place(NamedTuple):
    """Location of a tensor in the shared memory; offset in bytes."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


def share(tensors: Mapping[str, Tensor]) -> tuple[IO[bytes], list[Place]]:
    """Copy tensors (none of them empty) to an anonymous temporary file.

    The file disappears when no process has it open.

    Raises:
        OSError: if the disk is full.
    """
    file = tempfile.TemporaryFile(prefix="sixfold-")  # noqa: SIM115  it outlives this function: the caller closes it
    places: list[Place] = []
    at = 0
    for name, tensor in tensors.items():
        places.append(Place(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at))
        # Write to the file instead of copying into a mapping: a full disk is then an error here,
        # and not a SIGBUS at a later access.
        file.seek(at)
        file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    file.truncate(at)
    file.flush()
    return file, places


def map_tensors(descriptor: int, places: list[Place]) -> dict[str, Tensor]:
    """Map the tensors of a file made by `share`.

    A change in place is visible to every process that has mapped the file.
    """
    memory = mmap.mmap(descriptor, 0)
    return {
        p.name: (
            torch.frombuffer(
                memory, dtype=DTYPES[p.dtype], count=math.prod(p.shape), offset=p.offset
            ).view(p.shape)
        )
        for p in places
    }
