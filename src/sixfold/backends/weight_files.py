"""Checkpoint files that pass weights to an engine in another process.

A file names the version of its weights and has a CRC-32 of every tensor, so an engine refuses one
that is torn, altered or of another version, and goes on with its old weights. zlib computes it with
2 GB/s, beside sampling.
"""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from ..engine.weight_stages import count_bytes, stage

MODEL_FILE = "model.safetensors"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_PREFIX, _LOCK = "sixfold-weights-", "lock"
_HEADER_SIZE = struct.Struct("<Q")
_SUM = "crc32 "
"""Start of the key of a tensor's checksum in the metadata of a file. The tensor's name follows."""
_BEFORE = "before"
"""Key of the earlier files, as JSON, in the metadata of a file that is not whole."""


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


def sealed_bytes(
    weights: Mapping[str, Tensor],
    version: int,
    dtype: torch.dtype = torch.float32,
    every_name: bool = False,
) -> bytes:
    """Bytes of a safetensors file with the weights, for `read_sealed`.

    Args:
        weights: tensors by name. Tied tensors may have several names.
        version: version of the weights.
        dtype: dtype of the file.
        every_name: store a tied tensor under each of its names, not under the first alone.
    """
    own, tied = prepare_for_file(weights, dtype)
    if every_name:  # a file takes no tensors that share memory
        own |= {name: own[first].clone() for name, first in tied.items()}
    with stage("broadcast", sum(tensor.nbytes for tensor in own.values())):
        return save(own, {"format": "pt", "version": str(version), **_checksums(own)})


@dataclass(frozen=True)
class Before:
    """Files before one that has only changed tensors.

    Attributes:
        files: path and version of each since the last whole one, in their order.
        sums: checksum of every tensor after the last of them, by name.
    """

    files: tuple[tuple[str, int], ...]
    sums: Mapping[str, str]


WHOLE = Before((), {})
"""For a file that has all tensors."""


@dataclass(frozen=True)
class Sealed:
    """A file whose tensors have their checksums.

    Attributes:
        tensors: those that are in the file.
        sums: checksums of all tensors of the version, by name.
        before: path and version of the files that have the others.
    """

    tensors: dict[str, Tensor]
    sums: dict[str, str]
    before: list[tuple[str, int]]


def read_sealed(source: str | bytes, version: int) -> dict[str, Tensor]:
    """Weights of a whole file that `streamed_file` or `sealed_bytes` has written.

    Raises:
        ValueError: as `open_sealed`.
    """
    found = open_sealed(source, version)
    if missing := found.sums.keys() - found.tensors.keys():
        raise ValueError(f"the weights of version {version} lack '{min(missing)}'")
    return found.tensors


def open_sealed(source: str | bytes, version: int) -> Sealed:
    """Read a file that `streamed_file` or `sealed_bytes` has written.

    Args:
        source: path of the file, or its bytes.
        version: version that the weights must have.

    Raises:
        ValueError: if the file is torn or altered, or has another version.
    """
    broken = f"the weights of version {version} are torn or altered"
    try:
        tensors = load(source) if isinstance(source, bytes) else load_file(source)
        metadata = _metadata(source)
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{broken}: {error}") from error
    if (found := metadata.get("version")) != str(version):
        raise ValueError(f"the weights of version {version} were announced, but {found} arrived")
    sums, before = _sums_of(metadata), json.loads(metadata.get(_BEFORE, "[]"))
    for name in sorted(tensors.keys() | (() if before else sums.keys())):
        if name not in tensors or sums.get(name) != checksum(name, tensors[name]):
            raise ValueError(f"{broken}: '{name}' differs from its checksum")
    return Sealed(tensors, sums, [(path, number) for path, number in before])


def sealed_sums(path: str) -> dict[str, str]:
    """Checksums in a file that was just written."""
    return _sums_of(_metadata(path))


def _metadata(source: str | bytes) -> dict[str, str]:
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        size = _HEADER_SIZE.unpack(file.read(_HEADER_SIZE.size))[0]
        found: dict[str, str] = json.loads(file.read(size))["__metadata__"]
    return found


def _sums_of(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(_SUM): v for key, v in metadata.items() if key.startswith(_SUM)}


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Metadata of a file that holds these tensors."""
    return {_SUM + name: checksum(name, tensor) for name, tensor in tensors.items()}


def checksum(name: str, tensor: Tensor) -> str:
    """CRC-32 of a tensor on the CPU, with its name, dtype and shape."""
    what = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    return str(zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(what)))


@contextmanager
def weights_folder(
    weights: Mapping[str, Tensor], version: int, dtype: torch.dtype, in_memory: bool = False
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder with the weights in MODEL_FILE. It is deleted afterwards.

    Args:
        weights: tensors named as in a checkpoint.
        version: version of the weights.
        dtype: dtype of the file.
        in_memory: use /dev/shm if it has the space.

    Yields:
        The folder, and for every further name of a tied tensor the name it is stored under.
    """
    own, tied = prepare_for_file(weights, dtype)
    size = sum(tensor.nbytes for tensor in own.values())
    with _own_folder(_memory(size) if in_memory else None) as folder:
        with stage("broadcast", size):
            metadata = {"format": "pt", "version": str(version), **_checksums(own)}
            save_file(own, Path(folder, MODEL_FILE), metadata)
        del own  # the copy is as large as the model
        yield Path(folder), tied


def check_folder(folder: Path, version: int) -> None:
    """Check that a folder of `weights_folder` is whole. Its checksums are not computed.

    Raises:
        ValueError: if the file is torn, or has another version.
    """
    try:
        with safe_open(folder / MODEL_FILE, "pt") as file:  # reads the header alone
            found = file.metadata()["version"]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights of version {version} are torn: {error}") from error
    if found != str(version):
        raise ValueError(f"the weights of version {version} were announced, but {found} arrived")


class Saves(Protocol):
    """A configuration or a tokenizer."""

    def save_pretrained(self, folder: Path, /) -> object:
        """Write the files of a model folder."""
        ...


@contextmanager
def model_folder(
    weights: Mapping[str, Tensor], version: int, dtype: torch.dtype, parts: Sequence[Saves]
) -> Iterator[Path]:
    """Model folder for servers, in the directory for temporary files. It is deleted afterwards.

    Args:
        weights: tensors named as in a checkpoint.
        version: version of the weights.
        dtype: dtype of the file.
        parts: what else the folder has.
    """
    with weights_folder(weights, version, dtype) as (folder, _):
        for part in parts:
            part.save_pretrained(folder)
        yield folder


@dataclass(frozen=True)
class FileForm:
    """Names and parts that tensors have in a file to which they are written one by one.

    Attributes:
        names: names of all tensors in the file.
        numbers: how many numbers these tensors have together.
        parts: converts one tensor, given its name, to the tensors that stand for it in the file.
    """

    names: Sequence[str]
    numbers: int
    parts: Callable[[str, Tensor], Mapping[str, Tensor]]


@contextmanager
def streamed_file(
    size: int,
    weights: Mapping[str, Tensor],
    version: int,
    before: Before = WHOLE,
    dtype: torch.dtype = torch.float32,
    form: FileForm | None = None,
) -> Iterator[str]:
    """Path of a safetensors file with the weights. It is in memory if there is space.

    Read it by `read_sealed`, or by `SealedReader` if it is not whole.

    One tensor after the other is read and written, so no second copy of all is made. All are read
    even if the file cannot be written: other ranks gather them at the same moments. The file is
    deleted afterwards.

    Args:
        size: bytes of all tensors.
        weights: tensors by name, each of which may be computed when it is read.
        version: version of the weights.
        before: files before it. Tensors with the checksums that they had there are left out.
        dtype: float32 or bfloat16.
        form: names and parts of the tensors in the file. None: as they are.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = iter(weights.items())
    try:
        with _own_folder(_memory(size)) as folder:
            path = Path(folder, MODEL_FILE)
            with path.open("wb") as file:
                room = _header_room(form.names if form else weights, before.files)
                _stream(_cast(tensors, dtype, form), _DTYPES[dtype], version, before, room, file)
            yield str(path)
    finally:
        for _ in tensors:
            pass


def _header_room(names: Iterable[str], files: Sequence[tuple[str, int]] = ()) -> int:
    """Bytes that suffice for the header: of each tensor a name twice, shape, offsets, checksum."""
    paths = 2 * len(json.dumps(json.dumps(files)))
    total = sum(2 * len(json.dumps(name)) + 288 for name in ["__metadata__", *names]) + paths
    return -(-total // 8) * 8


def _cast(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, form: FileForm | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, on the CPU."""
    for name, tensor in tensors:
        with stage("cast"):
            own = tensor.detach().to("cpu", dtype)
            parts = form.parts(name, own) if form else {name: own}
        count_bytes("cast", own.nbytes)
        for stored, part in parts.items():
            yield stored, part.contiguous()


def _stream(
    tensors: Iterator[tuple[str, Tensor]],
    kind: str,
    version: int,
    before: Before,
    room: int,
    file: BinaryIO,
) -> None:
    """Write a safetensors file whose header, of `room` bytes, is written last."""
    metadata = {"format": "pt", "version": str(version)}
    if before.files:
        metadata[_BEFORE] = json.dumps(before.files)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    file.seek(_HEADER_SIZE.size + room)
    for name, own in tensors:
        with stage("broadcast"):
            metadata[_SUM + name] = checksum(name, own)
            if before.sums.get(name) == metadata[_SUM + name]:
                continue
            count_bytes("broadcast", own.nbytes)
            file.write(own.view(-1).view(torch.uint8).numpy().data)
        offsets = [end, end := end + own.nbytes]
        header[name] = {"dtype": kind, "shape": list(own.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit in {room}")
    file.seek(0)
    file.write(_HEADER_SIZE.pack(room) + text.ljust(room))


@contextmanager
def _own_folder(place: str | None) -> Iterator[str]:
    """A temporary folder. Those that killed processes have left beside it are deleted first."""
    for folder in abandoned_folders(place or tempfile.gettempdir()):
        shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as made:
        path = Path(made, f"{_LOCK}.new")
        with path.open("w") as file:
            with suppress(OSError):  # without locks, as on some file systems, nobody deletes it
                fcntl.flock(file, fcntl.LOCK_EX)
                path.rename(path.with_name(_LOCK))  # only now do others look at it
            yield made


def abandoned_folders(place: str | Path) -> Iterator[Path]:
    """Folders with weights whose process has ended without deleting them.

    A process holds a lock on a file in its folder, until it ends in whatever way.
    """
    for lock in Path(place).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open() as file:  # it is held, or has just been deleted
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield lock.parent


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
