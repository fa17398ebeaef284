"""What reward functions print, in a file of the run instead of on the terminal.

Reward processes write to the same pipe as functions that run in this process. A thread copies it to
the file. Before there is a file, the output is kept in memory: rewards are tried before the folder
of a run is made.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, TextIO

FILE = "rewards.log"
LIMIT_BYTES = 1 << 26
"""Most bytes that one process of a run writes to the file. A reward may print every completion."""

_HELD_BYTES = 1 << 20
_POLL_S = 0.1
_target: ContextVar[_Lines | None] = ContextVar("target", default=None)
_lock = threading.Lock()
_users = 0
_usual: dict[str, TextIO] = {}
"""The streams that `_Routed` ones stand for, by their names in `sys`."""


class Prints:
    """Collects what reward functions print. Close it after everything that writes to it.

    Without a file, `close` writes what was collected to standard error: the run ended before it had
    a folder, perhaps because of its rewards.

    Attributes:
        descriptor: where reward processes write.
    """

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        self._file: BinaryIO | None = None
        self._held = b""
        self._written = 0
        self._closing = False
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._copy, name="reward-prints", daemon=True)
        self._thread.start()

    def keep_in(self, folder: Path) -> None:
        """Write to `FILE` in a folder from now on, first what was collected so far."""
        with self._turn:
            self._file = (folder / FILE).open("ab", buffering=0)
            held, self._held = self._held, b""
            self._write(held)

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._closing = True
        self._thread.join()
        for descriptor in (self._reading, self.descriptor):
            os.close(descriptor)
        if self._file is not None:
            self._file.close()
        elif self._held:
            sys.stderr.write(self._held.decode(errors="replace"))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Collect what the calling thread or task prints in this block.

        Others print as usual meanwhile: `sys.stdout` is replaced by a stream that asks who writes.
        """
        lines = _Lines(self.descriptor)
        token = _target.set(lines)
        _redirect(+1)
        try:
            yield
        finally:
            _redirect(-1)
            _target.reset(token)
            lines.flush()

    def _copy(self) -> None:
        while True:
            closing = self._closing  # read before the pipe is found empty
            if select.select([self._reading], [], [], 0.0 if closing else _POLL_S)[0]:
                data = os.read(self._reading, 1 << 16)
                with self._turn:
                    self._write(data)
            elif closing:
                return

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._held = (self._held + data)[-_HELD_BYTES:]
            return
        before = self._written
        self._written += len(data)
        try:
            self._file.write(data[: max(0, LIMIT_BYTES - before)])
            if before <= LIMIT_BYTES < self._written:
                self._file.write(b"\n(what rewards print later is not kept)\n")
        except OSError:  # a full disk must not end a run because of a log
            return


class _Lines(io.TextIOBase):
    """Writes whole lines to a descriptor, so that those of different writers do not mix."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        self._rest += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        data = rest.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def fileno(self) -> int:
        return self._descriptor


class _Routed(io.TextIOBase):
    """Standard output or error, except for code inside `Prints.capturing`."""

    def __init__(self, usual: TextIO) -> None:
        self._usual = usual

    def write(self, text: str) -> int:
        return (_target.get() or self._usual).write(text)

    def flush(self) -> None:
        (_target.get() or self._usual).flush()

    def isatty(self) -> bool:
        return _target.get() is None and self._usual.isatty()

    def fileno(self) -> int:
        return (_target.get() or self._usual).fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._usual.encoding


def _redirect(change: int) -> None:
    """Count the blocks that capture. The first replaces the streams, the last puts them back."""
    global _users
    with _lock:
        if change > 0 and _users == 0:
            for name in ("stdout", "stderr"):
                _usual[name] = getattr(sys, name)
                setattr(sys, name, _Routed(_usual[name]))
        _users += change
        if _users == 0:
            for name, usual in _usual.items():
                if isinstance(getattr(sys, name), _Routed):  # else somebody replaced it meanwhile
                    setattr(sys, name, usual)
