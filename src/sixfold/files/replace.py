"""Replace a run (--overwrite). No torch.

    runs/NAME                the new run
    runs/.NAME.replaced      the earlier run, moved by a single rename
    runs/.NAME.deleting      the folder being deleted

The earlier run is deleted only when the new one has ended. If the process dies, either the new run
has a checkpoint or the earlier run is intact. `recover` puts the earlier run back if the new one
had not started.

The process that replaces a run holds the lock of the earlier one until the end. Otherwise another
process could put it back meanwhile.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .durable import disk_errors, faultpoint, fsync_path

_RESULTS = ("checkpoints/[!.]*", "blocks/[!.]*", "dataset.jsonl")
"""What a resume goes on from, in the folder of a run."""


def replaced_folder(path: Path) -> Path:
    """Folder that holds the run that `path` replaces."""
    real = path.resolve()
    return real.parent / f".{real.name}.replaced"


def move_aside(path: Path) -> bool:
    """Move the run away from `path` with one rename.

    The caller must hold the lock of this run, and of the run that it has itself replaced. After an
    interrupted replacement there are two runs, and one of them is deleted. The newer one is kept if
    it has a checkpoint, otherwise the older one.

    Returns:
        True if the newer run is kept.
    """
    real, aside = path.resolve(), replaced_folder(path)
    with disk_errors(f"cannot move {path} aside"):
        newer = not aside.is_dir() or has_result(real)
        if newer and aside.is_dir():
            _delete(aside, real)
        if newer:
            os.rename(real, aside)
        else:
            _delete(real, real)
        faultpoint("replace.aside")
        fsync_path(real.parent)
        faultpoint("replace.aside")
    return newer


def put_back(path: Path) -> None:
    """Move the replaced run back to `path`, and delete what is there. Needs the locks of both."""
    real, aside = path.resolve(), replaced_folder(path)
    with disk_errors(f"cannot put {aside} back"):
        doomed = _unname(real, real) if real.exists() else None
        faultpoint("replace.back")
        os.rename(aside, real)
        fsync_path(real.parent)
        faultpoint("replace.back")
        if doomed:
            shutil.rmtree(doomed)


def remove_replaced(path: Path) -> None:
    """Delete the run that `path` has replaced, and leftovers of an interrupted deletion."""
    real, aside = path.resolve(), replaced_folder(path)
    with disk_errors(f"cannot delete {aside}"):
        if aside.is_dir():
            _delete(aside, real)
        if _deletion_path(real).is_dir():
            shutil.rmtree(_deletion_path(real))


def has_result(path: Path) -> bool:
    """True if a run, or a stage of it, has something that a resume goes on from: a checkpoint,
    intact or not, or what it has sampled for a dataset.
    """
    places = (path, *path.glob("stages/*"))
    return any(any(place.glob(name)) for place in places for name in _RESULTS)


def _deletion_path(real: Path) -> Path:
    return real.parent / f".{real.name}.deleting"


def _unname(folder: Path, real: Path) -> Path:
    """Rename a folder before it is deleted, so that an interruption leaves no partial run."""
    doomed = _deletion_path(real)
    if doomed.is_dir():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    return doomed


def _delete(folder: Path, real: Path) -> None:
    doomed = _unname(folder, real)
    faultpoint("replace.delete")
    shutil.rmtree(doomed)
    faultpoint("replace.deleted")
