"""Checkpoints: the whole state of a run in a directory that is published atomically.

    checkpoints/step-000100/
      model/                 Hugging Face format, loads with from_pretrained
      trainer.safetensors    optimizer moments and other tensors, by name
      state.json             everything else, as plain JSON
      manifest.json          format, step, size and sha256 of every file, and its own checksum

The manifest is written last. A save writes into `.saving-step-000100`, flushes every file to the
disk, and only then renames the directory. A deletion first renames to `.deleting-...`.

So `step-N` is a complete checkpoint. If the disk fails later, the manifest reveals the damage.
Nothing here uses pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError
from .durable import disk_errors, faultpoint, fsync_path
from .listing import NAME, age, list_checkpoints
from .manifest import STATE, TENSORS, NewerFormat, is_intact, remember, verify, write_manifest

MODEL = "model"
_LEFTOVER = re.compile(rf"\.(saving|deleting)-{NAME.pattern}")
_SLACK_BYTES = 1 << 20  # tokenizer, configs, manifest


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: directory of the checkpoint.
        step: step of its stage.
        tensors: tensors by name, on the CPU.
        state: state as it was saved, with lists in place of tuples.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

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
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    stage: Literal["sft", "step"] = "step",
) -> Path:
    """Publish `checkpoints/STAGE-NNNNNN` and return its path. The caller must hold the run's lock.

    Leftovers of interrupted saves are removed first. An intact checkpoint of the same step is
    returned and never overwritten. That is correct only if a resumed run calls `set_aside_after`
    first.

    Args:
        checkpoints: directory of the run's checkpoints. Created if absent.
        step: step of the stage.
        write_model: writes the model and its tokenizer into the given directory.
        model_bytes: approximate size of the model on disk, in bytes.
        tensors: other tensors, by name.
        state: JSON values with string keys.
        stage: what `step` counts.

    Raises:
        UserError: if the disk is full or not writable. Nothing of this save is left, and earlier
            checkpoints are unchanged.
        ValueError: if `state` contains NaN.
    """
    final = checkpoints / f"{stage}-{step:06d}"
    staging = checkpoints / f".saving-{final.name}"
    state_text = json.dumps(state, allow_nan=False)
    with disk_errors(f"cannot save checkpoint {final}"):
        _ensure_directory(checkpoints)
        clean(checkpoints)
        if final.exists():
            if is_intact(final):
                return final
            _remove(final)
        _require_space(
            final,
            model_bytes + sum(t.nbytes for t in tensors.values()) + len(state_text) + _SLACK_BYTES,
        )
        try:
            _write_files(staging, write_model, tensors, state_text)
            write_manifest(staging, step)
            os.rename(staging, final)
            remember(final)
            faultpoint("checkpoint.publish")
            fsync_path(checkpoints)
            faultpoint("checkpoint.published")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


def load_newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """Newest usable checkpoint, or None if there are none, and a warning per damaged one skipped.

    Raises:
        NewerFormat: if a later release wrote one. Continuing from an older one would discard the
            work of that release.
        UserError: if there are checkpoints, but none is intact.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(checkpoints)):
        try:
            return load_checkpoint(path), warnings
        except NewerFormat:
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
        UserError: if it is not a checkpoint, incomplete, altered, or of a newer format.
    """
    step = verify(directory)
    try:
        with disk_errors(f"cannot read {directory}"):
            tensors = load_file(directory / TENSORS)
            state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{directory} is damaged: {error}") from error
    return Checkpoint(directory, step, tensors, state)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Delete checkpoints older than the newest `keep` intact ones, and return them.

    If fewer than `keep` are intact, nothing is deleted. A checkpoint written by this process counts
    as intact while the size and time of its files are unchanged, so nothing is hashed again.

    Raises:
        ValueError: if `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    newest_first = list_checkpoints(checkpoints)[::-1]
    if len(newest_first) <= keep:
        return []
    intact = 0
    for index, path in enumerate(newest_first):
        intact += is_intact(path)
        if intact == keep:
            return _remove_all(newest_first[index + 1 :])
    return []


def set_aside_after(checkpoints: Path, last: Path | None) -> list[Path]:
    """Rename checkpoints newer than `last` to `damaged-NAME`, and return their new paths.

    A run resumes from `last` because the newer ones are damaged. The resumed run needs their names
    for its own checkpoints. They are not deleted: the user may still recover data from them.

    Args:
        checkpoints: directory of the run's checkpoints.
        last: checkpoint from which the run resumes. None: all are renamed.
    """
    moved = []
    with disk_errors(f"cannot set aside checkpoints in {checkpoints}"):
        for path in list_checkpoints(checkpoints):
            if last is None or age(path) > age(last):
                names = (
                    f"damaged-{path.name}" + (f"-{number}" if number > 1 else "")
                    for number in count(1)
                )
                target = next(
                    path.with_name(name) for name in names if not path.with_name(name).exists()
                )
                os.rename(path, target)
                moved.append(target)
        if moved:
            fsync_path(checkpoints)
    return moved


def clean(checkpoints: Path) -> list[Path]:
    """Remove and return leftovers of interrupted saves and deletions.

    Only temporary names of this module are touched. The caller must hold the run's lock.
    """
    leftovers = [
        p
        for p in sorted(checkpoints.glob(".*"))
        if _LEFTOVER.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
    ]
    with disk_errors(f"cannot clean {checkpoints}"):
        for path in leftovers:
            shutil.rmtree(path)
            faultpoint("checkpoint.clean")
    return leftovers


def _ensure_directory(checkpoints: Path) -> None:
    if not checkpoints.is_dir():
        checkpoints.mkdir(parents=True)
        fsync_path(checkpoints.parent)


def _require_space(final: Path, needed: int) -> None:
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise UserError(
            f"checkpoint {final} needs {_size(needed)}, {_size(free)} free in {final.parent}: "
            "free some space, lower checkpoint.keep, or choose another run.dir"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _write_files(
    staging: Path,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, Tensor],
    state_text: str,
) -> None:
    """Write everything except the manifest, and flush it to the disk."""
    (staging / MODEL).mkdir(parents=True)
    faultpoint("checkpoint.directory")
    with _safetensors_disk_errors():
        write_model(staging / MODEL)
        faultpoint("checkpoint.model")
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            staging / TENSORS,
        )
        faultpoint("checkpoint.tensors")
    (staging / STATE).write_text(state_text, encoding="utf-8")
    faultpoint("checkpoint.state")
    for path in sorted(staging.rglob("*")):
        fsync_path(path)
        faultpoint("checkpoint.fsync")


@contextmanager
def _safetensors_disk_errors() -> Iterator[None]:
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


def _remove_all(paths: list[Path]) -> list[Path]:
    for path in paths:
        with disk_errors(f"cannot delete {path}"):
            _remove(path)
    return paths


def _remove(path: Path) -> None:
    """Delete a checkpoint.

    It is renamed before its first file is deleted, so an interruption leaves no partial checkpoint.
    """
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    faultpoint("checkpoint.unpublish")
    fsync_path(path.parent)
    faultpoint("checkpoint.unpublished")
    shutil.rmtree(doomed)
    faultpoint("checkpoint.delete")
