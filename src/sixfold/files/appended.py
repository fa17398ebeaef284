"""A file that gains lines during a run, and keeps them whatever other programs do to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .durable import disk_errors, fsync_path, write_bytes_atomic


class AppendedFile:
    """A file held open for appending.

    If another program deletes, renames or replaces it, the next line writes it again at its path,
    with all earlier lines: they can still be read from the open file. Several threads may append.

    Args:
        path: the file. Created if missing.
        warn: receives a line about what another program did to the file.

    Raises:
        UserError: if it cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._lock = threading.Lock()
        with disk_errors(f"cannot write {path}"):
            self._open()

    def append(self, data: bytes, *, to_disk: bool = False) -> None:
        """Append whole lines. If that fails, no part of them stays.

        Args:
            data: the lines.
            to_disk: return only when they are on the disk.

        Raises:
            UserError: if the disk is full or not writable.
        """
        with self._lock, disk_errors(f"cannot write {self._path}"):
            self._restore()
            try:
                rest = data
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                if to_disk:
                    os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
            self._size += len(data)

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> None:
        # Without a buffer: after a write that failed, closing the file would try it again.
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size

    def _restore(self) -> None:
        """Make `path` the open file again, with the lines of this run."""
        held = os.fstat(self._file)
        with suppress(FileNotFoundError):
            found = os.stat(self._path)
            if os.path.samestat(found, held):
                self._note_lost_lines(held.st_size)
                return
            other = self._path.with_name(f"replaced-{self._path.name}")
            os.replace(self._path, other)
            self._warn(f"{self._path} was replaced by another program, whose file is now {other}")
        lines = os.pread(self._file, self._size, 0)
        write_bytes_atomic(self._path, lines)
        os.close(self._file)
        self._open()
        fsync_path(self._path.parent)
        self._warn(f"{self._path} was deleted or renamed during the run. It is complete again")

    def _note_lost_lines(self, size: int) -> None:
        """Warn if another program has shortened the open file, and drop a line that it cut."""
        if size < self._size:
            whole = os.pread(self._file, size, 0).rfind(b"\n") + 1
            os.ftruncate(self._file, whole)
            self._warn(
                f"{self._path}: another program has deleted {self._size - whole} bytes of it."
                " These lines are lost"
            )
            size = whole
        self._size = size
