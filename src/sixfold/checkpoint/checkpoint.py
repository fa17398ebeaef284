"""Checkpoints: the whole state of a run in a directory that is published atomically.

    checkpoints/step-000100/
      model/           Hugging Face format, loads with from_pretrained
      (payload)        tensors and state of the run's components: `checkpoint/payload.py`
      manifest.json    format, step, size and sha256 of every file, and its own checksum

Nothing here uses pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UserError
from ..files.durable import faultpoint
from .listing import list_checkpoints
from .manifest import OtherRelease, verify
from .model_source import MODEL
from .payload import Payload, read_payload, safetensors_disk_errors
from .publication import publish

_SLACK_BYTES = 1 << 20  # tokenizer, configs, manifest


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        payload: tensors and state of the run's components.
    """

    path: Path
    step: int
    payload: Payload

    @property
    def stage(self) -> str:
        """`sft` or `step`: the stage that its step number counts."""
        return self.path.name.partition("-")[0]

    @property
    def model_path(self) -> Path:
        """Folder of the policy and its tokenizer, for from_pretrained."""
        return self.path / MODEL


def save_checkpoint(
    checkpoints: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    model_bytes: int,
    payload: Payload,
    stage: Literal["sft", "step"] = "step",
) -> Path:
    """Publish `checkpoints/STAGE-NNNNNN` and return its path. The caller must hold the run's lock.

    Args:
        checkpoints: directory of the run's checkpoints. Created if absent.
        write_model: writes the model and its tokenizer into the given directory.
        model_bytes: approximate size of the model on disk, in bytes.
        payload: tensors and state of the run's components.
        stage: what `step` counts.

    Raises:
        UserError: as `publish` does.
        ValueError: if the state contains NaN.
    """

    def write(directory: Path) -> None:
        (directory / MODEL).mkdir()
        with safetensors_disk_errors():
            write_model(directory / MODEL)
        faultpoint("checkpoint.model")
        payload.write(directory)

    size = model_bytes + payload.nbytes + _SLACK_BYTES
    return publish(checkpoints, f"{stage}-{step:06d}", step, size, write)


def load_newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """Newest usable checkpoint, or None if there are none, and a warning per damaged one skipped.

    Raises:
        OtherRelease: if another release wrote one. Continuing from an older one would discard the
            work of that release.
        UserError: if there are checkpoints, but none is intact.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(checkpoints)):
        try:
            return load_checkpoint(path), warnings
        except OtherRelease:
            raise
        except UserError as error:
            warnings.append(f"skipping a damaged checkpoint: {error}")
    if warnings:
        raise UserError(
            f"no checkpoint in {checkpoints} can be read: {warnings[0].partition(': ')[2]}. None"
            " was deleted: restore one, or start over with --overwrite"
        )
    return None, []


def load_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint after verifying every byte of it.

    Raises:
        OtherRelease: if another release wrote it.
        UserError: if it is not a checkpoint, incomplete or altered.
    """
    step = verify(directory)
    return Checkpoint(directory, step, read_payload(directory))
