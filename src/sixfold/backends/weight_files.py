"""Checkpoint files that pass weights to an engine in another process."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..engine.weight_stages import count_bytes, stage

MODEL_FILE = "model.safetensors"
_HEADER_SIZE = struct.Struct("<Q")


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


class Saves(Protocol):
    """A configuration or a tokenizer."""

    def save_pretrained(self, folder: Path, /) -> object:
        """Write the files of a model folder."""
        ...


@contextmanager
def model_folder(
    weights: Mapping[str, Tensor], dtype: torch.dtype, parts: Sequence[Saves]
) -> Iterator[Path]:
    """Model folder for servers, in the directory for temporary files. It is deleted afterwards.

    Args:
        weights: tensors named as in a checkpoint.
        dtype: dtype of the file.
        parts: what else the folder has.
    """
    with weights_folder(weights, dtype) as (folder, _):
        for part in parts:
            part.save_pretrained(folder)
        yield folder


@contextmanager
def streamed_file(size: int, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Path of a safetensors file with the weights in float32, in memory if it has the space.

    One tensor after the other is read and written, so no second copy of all is made. All are read
    even if the file cannot be written: other ranks gather them at the same moments. The file is
    deleted afterwards.

    Args:
        size: bytes of all tensors.
        weights: tensors by name, each of which may be computed when it is read.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = iter(weights.items())
    try:
        with tempfile.TemporaryDirectory(prefix="sixfold-weights-", dir=_memory(size)) as folder:
            path = Path(folder, MODEL_FILE)
            with path.open("wb") as file:
                _stream(tensors, _header_room(weights), file)
            yield str(path)
    finally:
        for _ in tensors:
            pass


def _header_room(names: Iterable[str]) -> int:
    """Bytes that suffice for the header of a safetensors file: a name, its shape and offsets."""
    return -(-sum(len(json.dumps(name)) + 256 for name in ["__metadata__", *names]) // 8) * 8


def _stream(tensors: Iterator[tuple[str, Tensor]], room: int, file: BinaryIO) -> None:
    """Write a safetensors file whose header, of `room` bytes, is written last."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    file.seek(_HEADER_SIZE.size + room)
    for name, tensor in tensors:
        with stage("cast"):
            own = tensor.detach().to("cpu", torch.float32).contiguous()
        count_bytes("cast", own.nbytes)
        with stage("broadcast", own.nbytes):
            file.write(own.view(-1).numpy().data)
        offsets = [end, end := end + own.nbytes]
        header[name] = {"dtype": "F32", "shape": list(own.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit in {room}")
    file.seek(0)
    file.write(_HEADER_SIZE.pack(room) + text.ljust(room))


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
