"""Watches the memory, processes and files of one job, and its time.

The kernel limits the memory of each process, but without a cgroup not their sum, and not the memory
that it holds for them: page tables, pipes and sockets. So the launcher reads all of it from the
cell's own /proc, which lists only the processes and sockets of the cell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

_ROOM = 2  # processes of the cell that are not the job's
MOST_DESCRIPTORS = 128
"""Descriptors that one process may open."""

_READINGS = 3
_FREE_DESCRIPTORS = 8  # of a process; each further one counts as a full pipe
_PIPE_BYTES = 1 << 16
_DATAGRAM = "0002"
_DATAGRAMS_WAITING = 12  # messages of closed sockets that one socket may hold (max_dgram_qlen)
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
        if self._memory_exceeded(self._proc):
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

    def _memory_exceeded(self, proc: int) -> bool:
        """Whether the job's memory is above its limit.

        Processes are read one after the other, so a fork or an exit in between makes shared pages
        count more than once. So several readings must all be above the limit.
        """
        limit = self._limits["memory_bytes"]
        return all(self._memory(proc, self._pids(proc)) > limit for _ in range(_READINGS))

    def _memory(self, proc: int, pids: Sequence[str]) -> int:
        """Bytes of memory. Pages that processes share after a fork count once."""
        kernel = _socket_bytes(proc) + sum(_pipe_bytes(proc, pid) for pid in pids)
        tables = {pid: _sizes(proc, f"{pid}/status") for pid in pids}
        kernel += sum(sizes.get("VmPTE", 0) + sizes.get("VmSwap", 0) for sizes in tables.values())
        own = sum(sizes.get("RssAnon", 0) for sizes in tables.values())
        if own + kernel <= self._limits["memory_bytes"]:
            return own + kernel
        return kernel + sum(_share(proc, pid) for pid in pids)


def _share(proc: int, pid: str) -> int:
    """Bytes of a process, with its part of what it shares. All of them if it hides its part."""
    share = _sizes(proc, f"{pid}/smaps_rollup")
    if "Pss_Anon" in share:
        return share["Pss_Anon"]
    return _sizes(proc, f"{pid}/status").get("RssAnon", 0)  # 0 if it has ended


def _sizes(proc: int, path: str) -> dict[str, int]:
    """Bytes by name, from a file with lines such as "RssAnon: 12 kB".

    RssAnon is resident memory of no file; pages that are shared after a fork count in each process.
    In Pss_Anon a page of n processes counts 1/n in each.
    """
    lines = (line.split() for line in _read(proc, path).decode(errors="replace").splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) << 10
        for words in lines
        if len(words) == 3 and words[2] == "kB"
    }


def _pipe_bytes(proc: int, pid: str) -> int:
    """Most memory that pipes of a process can hold."""
    try:
        folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    except PermissionError:  # the process hides them
        descriptors = MOST_DESCRIPTORS if pid != "1" else 0
    except _GONE:
        return 0
    else:
        try:
            descriptors = len(os.listdir(folder))
        except _GONE:
            return 0
        finally:
            os.close(folder)
    return max(0, descriptors - _FREE_DESCRIPTORS) * _PIPE_BYTES


def _socket_bytes(proc: int) -> int:
    """Most memory that sockets of the cell can hold, also those that no process has open.

    A Unix socket holds what it has sent until it is read. The queues of internet sockets are known.
    """
    words = _read(proc, "1/net/sockstat").split()
    used = int(words[2]) if len(words) > 2 else 0
    if not used:
        return 0
    local = [line.split() for line in _lines(proc, "1/net/unix")]
    total = sum(
        _DATAGRAMS_WAITING * _SENT_BYTES if words[4] == _DATAGRAM else 2 * _SENT_BYTES
        for words in local
    )
    if used > len(local):
        for name in ("tcp", "tcp6", "udp", "udp6"):
            for line in _lines(proc, f"1/net/{name}"):
                sent, _, received = line.split()[4].partition(":")
                total += _PIPE_BYTES + 2 * (int(sent, 16) + int(received, 16))
    return total


def _lines(proc: int, path: str) -> list[str]:
    """Lines of a table, without its head."""
    return _read(proc, path).decode(errors="replace").splitlines()[1:]


def _sent_bytes() -> int:
    """Bytes that a Unix socket may have sent before they are read."""
    with suppress(OSError, ValueError), open("/proc/sys/net/core/wmem_default") as file:
        return int(file.read())
    return 212_992


_SENT_BYTES = _sent_bytes()


def _read(folder: int, path: str) -> bytes:
    """Content of a file. Empty if its process has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    except _GONE:
        return b""
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except _GONE:
        return b""
    finally:
        os.close(descriptor)
    return b"".join(parts)
