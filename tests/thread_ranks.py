"""Ranks that are threads of one process: no process is started and no socket opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sixfold.ranks import ProcessRanks, Ranks

T = TypeVar("T")

LIMIT_S = 30.0
"""Longest wait for another thread."""


_here = threading.local()


def rank_here() -> int:
    """The rank of this thread, as `torch.distributed.get_rank` tells that of a process."""
    return int(_here.rank)


class Meeting:
    """Where the threads of a group exchange objects."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class ThreadRanks(ProcessRanks):
    """One rank: a thread that meets the others at a barrier."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._agreed = None

    def gather(self, value: T) -> list[T]:
        return self._meeting.exchange(self.rank, value)

    def barrier(self, name: str) -> None:
        self.gather(None)


def on_threads(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Result of `work(ranks)` on each rank, or the exception that it raised."""
    meeting, found = Meeting(size), list[Any]([None] * size)

    def rank(number: int) -> None:
        _here.rank = number
        try:
            found[number] = work(ThreadRanks(number, meeting))
        except Exception as error:  # noqa: BLE001  the caller looks at it
            found[number] = error

    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(1, size)]
    for thread in threads:
        thread.start()
    rank(0)
    for thread in threads:
        thread.join(LIMIT_S)
    return found
