"""Bytes that appear whole or not at all: the counterpart of `run_folder.write_text_atomic`."""

from __future__ import annotations

import os
from pathlib import Path

from sixfold.run_folder import disk_errors, fsync_path


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader, or a crash at any moment, finds the old file or the new one. UserError if the disk refuses."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with disk_errors(f"cannot write {path}"):
        try:
            temporary.write_bytes(data)
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
