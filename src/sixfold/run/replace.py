"""Replacing a run (--overwrite): the earlier one is moved aside, and removed only when the new one has ended. No torch.

    runs/NAME                the new run
    runs/.NAME.replaced      the earlier run, whole, as one rename left it
    runs/.NAME.deleting      what is being deleted

A process that dies leaves the new run with a checkpoint, or the earlier one whole: `recover` puts the earlier one back where the new one
had not begun. Who replaces a run holds its lock until the end, so that nobody puts it back meanwhile.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .durable import disk_errors, faultpoint, fsync_path


def replaced(path: Path) -> Path:
    """Where the run that `path` replaces is kept."""
    real = path.resolve()
    return real.parent / f".{real.name}.replaced"


def move_aside(path: Path) -> bool:
    """Take the run away from `path`, with one rename. Needs its lock, and that of the run that it has replaced itself.

    Where an earlier replacement was not ended there are two runs already. One is kept: the newer one if it has a checkpoint, else the older
    one. True when it is the newer one.
    """
    real, aside = path.resolve(), replaced(path)
    with disk_errors(f"cannot move {path} aside"):
        newer = not aside.is_dir() or has_checkpoint(real)
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
    """Make the run that was moved aside stand at `path` again; what is there now is deleted. Needs the locks of both."""
    real, aside = path.resolve(), replaced(path)
    with disk_errors(f"cannot put {aside} back"):
        doomed = _unname(real, real) if real.exists() else None
        faultpoint("replace.back")
        os.rename(aside, real)
        fsync_path(real.parent)
        faultpoint("replace.back")
        if doomed:
            shutil.rmtree(doomed)


def remove_replaced(path: Path) -> None:
    """Delete the run that `path` has replaced, and what an interrupted deletion left."""
    real, aside = path.resolve(), replaced(path)
    with disk_errors(f"cannot delete {aside}"):
        if aside.is_dir():
            _delete(aside, real)
        if _doomed(real).is_dir():
            shutil.rmtree(_doomed(real))


def has_checkpoint(path: Path) -> bool:
    """True when a run has published a checkpoint, intact or not."""
    return any(not entry.name.startswith(".") for entry in (path / "checkpoints").glob("*"))


def _doomed(real: Path) -> Path:
    return real.parent / f".{real.name}.deleting"


def _unname(folder: Path, real: Path) -> Path:
    """Rename a folder to the name under which it is deleted: a kill in between leaves nothing that looks like a run."""
    doomed = _doomed(real)
    if doomed.is_dir():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    return doomed


def _delete(folder: Path, real: Path) -> None:
    doomed = _unname(folder, real)
    faultpoint("replace.delete")
    shutil.rmtree(doomed)
    faultpoint("replace.deleted")
