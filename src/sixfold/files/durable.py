"""Atomic file writes, disk errors as messages, and fault points for tests.

Every package that writes files may import this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EBUSY, EDQUOT, EFBIG, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import UserError

_FULL = "no space left: free some, or choose a folder on another disk (run.dir)"
_FORBIDDEN = "not writable: choose another folder (run.dir) or change its permissions"
_BUSY = "in use, for example as a mount point: choose another name (run.name)"
_A_FILE = "a part of this path is a file, not a folder: choose another folder (run.dir)"
_LONG = "the name is too long for this disk: choose a shorter one (run.name, run.dir)"
_LIMIT = "larger than the largest file that is allowed: raise the limit (ulimit -f)"
_DISK_ERRORS = {
    EBUSY: _BUSY,
    ENOSPC: _FULL,
    EDQUOT: _FULL,
    EACCES: _FORBIDDEN,
    EPERM: _FORBIDDEN,
    EROFS: _FORBIDDEN,
    ENOTDIR: _A_FILE,
    ENAMETOOLONG: _LONG,
    EFBIG: _LIMIT,
}

_arrivals = count(1)


def faultpoint(name: str) -> None:
    """Point at which tests can kill the process.

    SIXFOLD_FAULT=NAME:K kills the process at the K-th arrival at a point whose name begins with
    NAME. An empty NAME stands for every point.
    """
    prefix, colon, arrival = os.environ.get("SIXFOLD_FAULT", "").rpartition(":")
    if colon and name.startswith(prefix) and next(_arrivals) == int(arrival):
        os._exit(137)


@contextmanager
def disk_errors(failure: str) -> Iterator[None]:
    """Turn an OSError into a UserError "FAILURE: reason and remedy".

    Put only file operations inside the block: any other OSError would be reported as a disk error.
    """
    try:
        yield
    except OSError as error:
        reason = _DISK_ERRORS.get(error.errno or 0) or str(error)
        raise UserError(f"{failure}: {reason}") from error


def check_target(path: Path) -> None:
    """Refuse a path at which no file can be written, before the work that fills the file.

    Raises:
        UserError: if `path` is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder. Give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: no folder {path.parent}. Create it first")


def fsync_path(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader, or a crash, sees either the old file or the new one.

    Raises:
        UserError: if the disk refuses the write.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with disk_errors(f"cannot write {path}"):
        try:
            temporary.write_bytes(data)
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text with `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: Path, value: Any) -> None:
    """Write indented JSON with `write_bytes_atomic`. Nothing is written if the value is invalid.

    Raises:
        ValueError: for NaN and infinity.
        TypeError: for values that JSON cannot represent.
    """
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
