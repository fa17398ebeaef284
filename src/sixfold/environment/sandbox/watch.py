"""Watches the memory, processes and files of one job, and its time.

The kernel limits the memory of each process, but without a cgroup not their sum. So the launcher
reads it from the cell's own /proc, which lists only the processes of the cell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOM = 2  # processes of the cell that are not the job's
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class Watch:
    """Limits of a job that runs.

    Args:
        limits: began (monotonic time), wall_s, memory_bytes, processes, files.
        folders: descriptors of the cell's /proc and of its scratch folder, or nothing. They are
            closed by `close`.
    """

    def __init__(self, limits: Mapping[str, float], folders: Sequence[int]) -> None:
        self.began = limits["began"]
        self._limits = limits
        self._folders = list(folders)
        self._proc: int | None = None
        self._scratch: int | None = None
        if len(folders) == 2:
            self._proc, self._scratch = folders

    def exceeded(self, now: float) -> tuple[str, str] | None:
        """Verdict and detail of the first limit that the job exceeds."""
        limits = self._limits
        if now - self.began > limits["wall_s"]:
            return "timeout", f"ran for more than {limits['wall_s']:g} s"
        if self._proc is None:
            return None
        pids = self._pids(self._proc)
        if len(pids) > limits["processes"] + _ROOM:
            return "runtime_error", f"more than {limits['processes']:g} processes"
        if self._memory(self._proc, pids) > limits["memory_bytes"]:
            return "out_of_memory", f"used more than {limits['memory_bytes'] / 2**20:g} MiB"
        found = self.left_behind()
        return found if found[0] else None

    def left_behind(self) -> tuple[str, str]:
        """Verdict and detail if there are too many files. Works also after the end of the cell."""
        if self._scratch is None:
            return "", ""
        state = os.statvfs(self._scratch)
        if state.f_files - state.f_ffree <= self._limits["files"]:
            return "", ""
        return "runtime_error", f"made more than {self._limits['files']:g} files"

    def close(self) -> None:
        """Close the descriptors, so that the cell's file systems end."""
        for folder in self._folders:
            os.close(folder)
        self._folders, self._proc, self._scratch = [], None, None

    @staticmethod
    def _pids(proc: int) -> list[str]:
        with suppress(OSError):  # the cell has ended
            return [name for name in os.listdir(proc) if name.isdigit()]
        return []

    def _memory(self, proc: int, pids: Sequence[str]) -> int:
        """Bytes of memory. Pages that processes share after a fork count once."""
        own = sum(_unshared_pages(proc, pid) for pid in pids) * _PAGE_BYTES
        if own <= self._limits["memory_bytes"]:
            return own
        return sum(_proportional_bytes(proc, pid) for pid in pids)


def _unshared_pages(proc: int, pid: str) -> int:
    """Resident pages of no file. Pages that are shared after a fork count in each process."""
    words = _read(proc, f"{pid}/statm").split()
    return int(words[1]) - int(words[2]) if len(words) > 2 else 0


def _proportional_bytes(proc: int, pid: str) -> int:
    """Resident memory of no file. A page of n processes counts 1/n in each."""
    for line in _read(proc, f"{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return _unshared_pages(proc, pid) * _PAGE_BYTES


def _read(folder: int, path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    except _GONE:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except _GONE:
        return b""
    finally:
        os.close(descriptor)
