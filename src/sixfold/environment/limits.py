"""Bounds on what checking one answer may cost, and whose fault it is if a bound is exceeded.

Failures of a check count as failures of the checker, which stop a run if there are too many. A reward that
has understood its reference answer calls `blame_answer`: from then on a time-out or the death of its
process means that the answer is wrong.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

WORKER_MEMORY_BYTES = 3 << 30
"""Address space of a worker that runs only built-in rewards. Enough for their libraries."""

_REPEAT_S = 0.05  # libraries swallow an exception now and then: raise it again


class OutOfTime(BaseException):
    """The time limit was reached. Not an Exception: libraries catch those and go on."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after `seconds` of CPU time.

    Only in the main thread, and only if nobody else uses the timer of user time; elsewhere there is no
    limit. CPU time and not wall time: a busy machine must not make answers wrong. It costs about 10 microseconds.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    active = True

    def stop(number: int, frame: FrameType | None) -> None:
        if active:
            raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def limit_memory() -> None:
    """Bound the address space of this process: an allocation beyond it raises MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = WORKER_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(WORKER_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


_on_blame: list[Callable[[], None]] = []


def blame_answer() -> None:
    """Say that the reference answer is sound: what fails from here on is the fault of the answer."""
    for tell in _on_blame:
        tell()


def on_blame(tell: Callable[[], None]) -> None:
    """Have `blame_answer` call `tell`: how a worker learns of it."""
    _on_blame[:] = [tell]
