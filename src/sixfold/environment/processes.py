"""Process trees of reward checks: find and end every process that a check has started.

On Linux this includes processes in other sessions. `adopt_orphans` makes the kernel reparent
orphaned descendants to this process, so every descendant can be found from here. Other systems have
no such call; there only the process group of a worker is ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

GRACE_S = 1.0
"""Seconds that a worker has to finish after its trainer is gone."""

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_TIMEOUT_S = 2.0  # a fork bomb can outrun the loop that kills it


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (Linux)."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent process dies (Linux).

    The signal is sent when the parent's *thread* ends, so call it only below a parent with one
    thread.
    """
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def has_children() -> bool:
    """True if this process has a child, running or not yet reaped. Costs about a microsecond."""
    if not _LINUX:
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(keep: Collection[int] = ()) -> list[int]:
    """Process ids below this process (Linux), without processes in `keep` and their descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _LINUX else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), ()) if pid not in keep]
        found += below
        waiting += below
    return found


def end_descendants(keep: Collection[int] = ()) -> None:
    """Kill and reap every descendant of this process that is not in `keep`."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while has_children() and (doomed := descendants(keep)) and time.monotonic() < deadline:
        for pid in doomed:
            # It ended meanwhile, or runs as another user.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in doomed:
            # A grandchild: it is reparented to this process when its parent is gone.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def supervise(child: int, requests: int) -> NoReturn:
    """Wait until the worker `child` ends or must end, then end its process tree and exit likewise.

    It must end on SIGTERM, or `GRACE_S` after the other end of the pipe `requests` was closed: the
    trainer has then closed the pool or is dead. Whatever a reward function does to signals or
    timers has no effect here.
    """
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(wake, False)
    told: list[int] = []
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(requests, 0)  # a hang-up is always reported
    deadline: float | None = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _exit_as(status)
        if told or (deadline is not None and time.monotonic() > deadline):
            os.kill(child, signal.SIGKILL)
            _exit_as(os.waitpid(child, 0)[1])
        patience = None if deadline is None else 1000 * (deadline - time.monotonic()) + 1
        for descriptor, _ in poll.poll(patience):
            if descriptor == wake:
                os.read(wake, 4096)
            else:
                poll.unregister(requests)
                deadline = time.monotonic() + GRACE_S


def _exit_as(status: int) -> NoReturn:
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)
