"""Publish directories atomically under the names of checkpoints, prune them, and set them aside.

A save writes into `.saving-step-000100`, flushes every file to the disk, writes the manifest, and
only then renames the directory. A deletion first renames to `.deleting-...`. So `step-N` is
complete. If the disk fails later, the manifest reveals the damage.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path

from ..errors import UserError
from ..files.durable import disk_errors, faultpoint, fsync_path
from .listing import NAME, age, list_checkpoints
from .manifest import is_intact, remember, write_manifest

_LEFTOVER = re.compile(rf"\.(saving|deleting|parts)-{NAME.pattern}")


def publish(
    checkpoints: Path, name: str, step: int, nbytes: int, write: Callable[[Path], None]
) -> Path:
    """Publish `checkpoints/NAME` and return its path. The caller must hold the run's lock.

    Leftovers of interrupted saves are removed first. An intact checkpoint of the same name is
    returned and never overwritten. That is correct only if a resumed run calls `set_aside_after`
    first.

    Args:
        checkpoints: directory of the run's checkpoints. Created if absent; its parent must exist.
        name: stage and step, as in `step-000100`.
        step: step, recorded in the manifest.
        nbytes: approximate size on disk.
        write: writes the files into the given directory.

    Raises:
        UserError: if the disk is full or not writable. Nothing of this save is left, and earlier
            checkpoints are unchanged.
    """
    final = checkpoints / name
    staging = checkpoints / f".saving-{name}"
    with disk_errors(f"cannot save checkpoint {final}"):
        _ensure_directory(checkpoints)
        clean(checkpoints, spared=parts_folder(final))
        if final.exists():
            if is_intact(final):
                return final
            _remove(final)
        _require_space(final, nbytes)
        try:
            staging.mkdir()
            faultpoint("checkpoint.directory")
            write(staging)
            for path in sorted(staging.rglob("*")):
                fsync_path(path)
                faultpoint("checkpoint.fsync")
            write_manifest(staging, step)
            os.rename(staging, final)
            remember(final)
            faultpoint("checkpoint.publish")
            fsync_path(checkpoints)
            faultpoint("checkpoint.published")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder so that it appears complete or not at all. An earlier folder is replaced.

    Args:
        folder: the folder. Its parent must exist.
        write: writes the files into the given directory.

    Raises:
        UserError: if the disk is full or not writable.
    """
    staging = folder.with_name(f".saving-{folder.name}")
    with disk_errors(f"cannot save {folder}"):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            write(staging)
            for path in sorted(staging.rglob("*")):
                fsync_path(path)
            faultpoint(f"{folder.name}.written")
            if folder.exists():
                _remove(folder)
            os.rename(staging, folder)
            fsync_path(folder.parent)
            faultpoint(f"{folder.name}.published")
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def prune(checkpoints: Path, keep: int, spared: Collection[Path] = ()) -> list[Path]:
    """Delete checkpoints older than the newest `keep` intact ones, except those in `spared`.

    If fewer than `keep` are intact, nothing is deleted. A checkpoint written by this process counts
    as intact while the size and time of its files are unchanged, so nothing is hashed again.

    Returns:
        The deleted checkpoints.

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
            return _remove_all([p for p in newest_first[index + 1 :] if p not in spared])
    return []


def set_aside_after(checkpoints: Path, last: Path | None) -> list[Path]:
    """Rename checkpoints newer than `last` to `damaged-NAME`, and return their new paths.

    A run resumes from `last` because the newer ones are damaged. The resumed run needs their names
    for its own checkpoints. They are not deleted: the user may still recover data from them.

    Args:
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


def parts_folder(path: Path) -> Path:
    """Hidden folder in which several ranks write the parts of a checkpoint."""
    return path.with_name(f".parts-{path.name}")


def clean(checkpoints: Path, spared: Path | None = None) -> list[Path]:
    """Remove and return leftovers of interrupted saves and deletions.

    Only temporary names of this module are touched. The caller must hold the run's lock.

    Args:
        spared: folder that is still in use, and stays.
    """
    leftovers = [
        p
        for p in sorted(checkpoints.glob(".*"))
        if _LEFTOVER.fullmatch(p.name) and p.is_dir() and not p.is_symlink() and p != spared
    ]
    with disk_errors(f"cannot clean {checkpoints}"):
        for path in leftovers:
            shutil.rmtree(path)
            faultpoint("checkpoint.clean")
    return leftovers


def _ensure_directory(checkpoints: Path) -> None:
    if not checkpoints.is_dir():
        checkpoints.mkdir()  # no parents: a run folder that was deleted must not appear again
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
