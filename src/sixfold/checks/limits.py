"""Limits on the cost of checking one answer, and the party at fault if a limit is exceeded. The
weakest isolation that sandboxes may have.

By default the checker is at fault, and the check has failed. Too many failed checks stop a run. A
reward that has parsed its reference answer calls `blame_answer`. After that, the answer is wrong if
the check times out or its process dies.
"""

from __future__ import annotations

import gc
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal, get_args

WORKER_MEMORY_BYTES = 3 << 30
"""Maximum address space of a worker that runs only built-in rewards, in bytes. Enough for their
libraries.
"""

_REPEAT_S = 0.05  # libraries sometimes swallow the exception: raise it again


class OutOfTime(BaseException):
    """The time limit was reached.

    It is not an Exception, because libraries catch those and continue.
    """


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after `seconds` of CPU time of this thread.

    The limit applies only in the main thread, and only if the timer of user time (ITIMER_VIRTUAL)
    is free. It counts CPU time, not wall time: a busy machine must not make answers wrong. Other
    threads do not count, and the garbage collector is off in the block: in a large process one
    collection takes longer than a check. It costs about 10 microseconds.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_VIRTUAL)[0]
    ):
        yield
        return
    active = True
    end = time.thread_time() + seconds

    def stop(number: int, frame: FrameType | None) -> None:
        if active and time.thread_time() >= end:  # the timer counts all threads
            raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    collects = gc.isenabled()
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collects:
            gc.enable()


def limit_memory() -> None:
    """Limit the address space of this process: an allocation beyond it raises MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = (
        WORKER_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(WORKER_MEMORY_BYTES, hard)
    )
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


_on_blame: list[Callable[[], None]] = []


def blame_answer() -> None:
    """Declare the reference answer sound: later failures of this check count against the answer."""
    for tell in _on_blame:
        tell()


def on_blame(tell: Callable[[], None]) -> None:
    """Register a function that `blame_answer` calls, so that a worker can report the call."""
    _on_blame[:] = [tell]


_time_limit_s = [5.0]


def set_time_limit(seconds: float) -> None:
    """Set `environment.timeout_s` in a process that checks answers."""
    _time_limit_s[:] = [seconds]


def time_limit_s() -> float:
    """Seconds that a check may take: `environment.timeout_s`.

    Some rewards keep it themselves (`RewardRow.times_itself`), because their checks wait for a
    sandbox or a connection first.
    """
    return _time_limit_s[0]


Level = Literal["namespaces", "limits"]
"""Strongest first.

- namespaces: every job runs in user, mount, pid, network and ipc namespaces of its own, under a
  seccomp filter and resource limits.
- limits: resource limits only. A job can read the files of its user and use the network. This is
  not sufficient for hostile code.
"""

LEVELS: tuple[Level, ...] = get_args(Level)

_allowed: list[Level] = ["namespaces"]


def allow(level: Level) -> None:
    """Set the weakest level of later sandboxes, in this process and in its reward processes."""
    _allowed[:] = [level]


def allowed() -> Level:
    """The weakest level that sandboxes may have."""
    return _allowed[0]
