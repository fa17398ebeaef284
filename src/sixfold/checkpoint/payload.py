"""Payload of a checkpoint: the tensors and the JSON state of its components, as files.

    trainer.safetensors    tensors, named COMPONENT/NAME; with several ranks, one file for each
    state.json             {"format": ..., "inputs": {...}, "components": {COMPONENT: state}}

Only this module knows these files. Publication, manifest, listing and pruning work on any files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError
from ..files.durable import disk_errors, faultpoint
from .manifest import OtherRelease

TENSORS, STATE = "trainer.safetensors", "state.json"

FORMAT = 3
"""Format of the payload. Format 3 stores components by name."""


@dataclass(frozen=True)
class Payload:
    """State of a run's components, and of the inputs that the run was made with.

    Attributes:
        tensors: tensors of all components, named COMPONENT/NAME.
        inputs: JSON form of settings, tasks and the like, compared at a resume.
    """

    tensors: Mapping[str, Tensor]
    components: Mapping[str, Mapping[str, Any]]
    inputs: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """Content of the state file.

        Raises:
            ValueError: if the state contains NaN.
        """
        content = {"format": FORMAT, "inputs": self.inputs, "components": self.components}
        return json.dumps(content, allow_nan=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + len(self.text)

    def write(self, directory: Path) -> None:
        """Write the files. The caller flushes them to the disk.

        With several ranks, the tensors are in the directory already, and only the state is written.
        """
        tensors = {name: t.detach().contiguous() for name, t in self.tensors.items()}
        if tensors or not _files(directory):
            with safetensors_disk_errors():
                save_file(tensors, directory / TENSORS)
        faultpoint("checkpoint.tensors")
        (directory / STATE).write_text(self.text, encoding="utf-8")
        faultpoint("checkpoint.state")


def read_payload(directory: Path) -> Payload:
    """Read the payload of a verified checkpoint. Its tensors are on the CPU.

    Raises:
        OtherRelease: if it has another format.
        UserError: if it cannot be read.
    """
    content = read_state(directory)
    try:
        with disk_errors(f"cannot read {directory}"):
            tensors = {
                name: tensor
                for file in _files(directory) or [directory / TENSORS]
                for name, tensor in load_file(file).items()
            }
    except SafetensorError as error:
        raise UserError(f"{directory} is damaged: {error}") from error
    return Payload(tensors, content["components"], content["inputs"])


def read_state(directory: Path) -> dict[str, Any]:
    """Content of the state file.

    Raises:
        OtherRelease: if the payload has another format.
        UserError: if it cannot be read.
    """
    if not (directory / STATE).is_file():
        raise UserError(f"{directory} is incomplete (missing {STATE})")
    try:
        with disk_errors(f"cannot read {directory}"):
            content = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{directory} is damaged: {error}") from error
    number = content.get("format", 0) if isinstance(content, dict) else 0
    if number > FORMAT:
        raise OtherRelease(
            f"{directory}: payload format {number} is newer than this release (max {FORMAT});"
            " upgrade sixfold"
        )
    if number < FORMAT:
        raise OtherRelease(
            f"{directory} was saved by an earlier release of Sixfold and cannot be resumed. Set"
            f" model.path = '{directory}' in a new run to continue from its weights"
        )
    return dict(content)


def part_name(kind: str, rank: int, size: int) -> str:
    """Name of the file with one rank's share of tensors, in the convention of Hugging Face."""
    return f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


def _files(directory: Path) -> list[Path]:
    """Tensor files of several ranks. Empty if one process wrote the checkpoint."""
    return sorted(directory.glob("trainer-*-of-*.safetensors"))


@contextmanager
def safetensors_disk_errors() -> Iterator[None]:
    """Turn a safetensors error that hides an operating system error back into an OSError.

    Without this, a full disk would not be reported as one.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
