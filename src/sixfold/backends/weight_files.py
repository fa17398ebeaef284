"""Checkpoint files that pass weights to an engine in another process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..engine.weight_stages import count_bytes, stage

MODEL_FILE = "model.safetensors"


def prepare_for_file(
    weights: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Prepare weights for a file: each tensor once, on the CPU and in `dtype`.

    Args:
        weights: tensors by name. Tied tensors may have several names.
        dtype: dtype of the result.

    Returns:
        The tensors by name, and for every further name of a tied tensor the name it is stored
        under.
    """
    weights = dict(weights)  # all at once: the address of a tensor that was freed is used again
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        stored_as = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if stored_as != name:
            tied[name] = stored_as
    with stage("cast"):
        own = {
            name: weights[name].detach().to("cpu", dtype).contiguous() for name in first.values()
        }
    count_bytes("cast", sum(tensor.nbytes for tensor in own.values()))
    return own, tied


@contextmanager
def weights_folder(
    weights: Mapping[str, Tensor], dtype: torch.dtype, in_memory: bool = False
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder with the weights in MODEL_FILE. It is deleted afterwards.

    Args:
        weights: tensors named as in a checkpoint.
        dtype: dtype of the file.
        in_memory: use /dev/shm if it has the space.

    Yields:
        The folder, and for every further name of a tied tensor the name it is stored under.
    """
    own, tied = prepare_for_file(weights, dtype)
    size = sum(tensor.nbytes for tensor in own.values())
    with tempfile.TemporaryDirectory(
        prefix="sixfold-weights-", dir=_memory(size) if in_memory else None
    ) as folder:
        with stage("broadcast", size):
            save_file(own, Path(folder, MODEL_FILE), metadata={"format": "pt"})
        del own  # the copy is as large as the model
        yield Path(folder), tied


@contextmanager
def weights_file(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Path of a safetensors file with the weights in float32, in memory if it has the space.

    The file is deleted afterwards.
    """
    with weights_folder(weights, torch.float32, in_memory=True) as (folder, _):
        yield str(folder / MODEL_FILE)


def _memory(size: int) -> str | None:
    """Folder for a file of `size` bytes: /dev/shm if it has the space, else None for the default.

    The check is needed because a container's /dev/shm often has only 64 MB.
    """
    shared = Path("/dev/shm")
    return (
        str(shared)
        if shared.is_dir() and shutil.disk_usage(shared).free > 1.1 * size + (1 << 20)
        else None
    )
