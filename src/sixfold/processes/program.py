"""The child's side of `child.py`: `python -P program.py PARENT REQUESTS REPLIES TARGET`.

PARENT is the pid of the parent. REQUESTS and REPLIES are file descriptors. TARGET is a module, or
the path of a file, that defines `serve(requests: Requests)`. A TARGET of `--` and the words of a
command run the command, which keeps its standard input and output.

This file needs only the standard library and is started by its path, because the interpreter may
belong to an environment without Sixfold.

There are two processes. The first is a supervisor, which loads nothing. The second imports TARGET
and serves. When the second ends, or has to end, the supervisor ends every process that the second
has started. On Linux this includes processes in other sessions: `adopt_orphans` makes the kernel
reparent orphaned descendants to the supervisor, which can then find them. Other systems have no
such call; there only the process group ends.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import select
import signal
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NoReturn

GRACE_S = 1.0
"""Seconds that the program has to finish once its parent has closed the pipe or is gone."""

HEADER = struct.Struct("!4scIQQ")
"""Precedes every message: MARK, kind, pid, number of the answer, bytes of the body.

`pid` is the sender's. In a request, the number is that of its first answer, and the field `pid`
holds the number of answers requested.
"""

MARK = b"\x006f\n"  # text that a library prints to the pipe does not begin like this
REQUEST, ANSWER, NOTE, ERROR = b"Q", b"A", b"N", b"E"

COMMAND = "--"
"""TARGET that stands for a command."""

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_TIMEOUT_S = 2.0  # a fork bomb can outrun the loop that kills it
_TRACKERS_S = 1.0  # time for Python's trackers to end by themselves
_READ_BYTES = 1 << 16  # the capacity of a pipe on Linux


class Requests:
    """Requests of the parent, as an iterator of their bodies. It ends when the parent hangs up.

    A request may be read before earlier ones have all their answers. Another thread may then give
    the answers, but only one thread at a time.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._stream = os.fdopen(requests, "rb", buffering=_READ_BYTES)
        self._replies = replies
        self._program = self._pid = os.getpid()
        self._number = self._last = 1  # of the next answer, and of the last that is asked for
        os.register_at_fork(after_in_child=partial(_note_fork, weakref.ref(self)))

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            raise StopIteration
        _, _, answers, first, length = HEADER.unpack(header)
        self._last = first + answers - 1
        body = self._stream.read(length)
        if len(body) < length:  # the parent died while it wrote
            raise StopIteration
        return body

    def answer(self, body: bytes = b"") -> None:
        """Send the next answer. The parent ignores one that a forked copy of this process sends.

        Raises:
            RuntimeError: if the request has all its answers.
            BrokenPipeError: if the parent is gone.
        """
        if self._number > self._last:
            raise RuntimeError("more answers than the request asks for")
        self._send(ANSWER, self._pid, body)
        self._number += 1

    def note(self, body: bytes = b"") -> None:
        """Send a sign of life, or a message that no request waits for, before the next answer.

        `Child.arrived` shows it as a message. A forked copy of this process may do so too.
        """
        self._send(NOTE, self._program, body)

    def fail(self, why: str = "") -> None:
        """Answer with a reason. Empty: the traceback of the exception that is being handled."""
        self._send(ERROR, self._pid, (why or traceback.format_exc()).encode())
        self._number += 1

    def _send(self, kind: bytes, pid: int, body: bytes) -> None:
        message = memoryview(HEADER.pack(MARK, kind, pid, self._number, len(body)) + body)
        while message:
            message = message[os.write(self._replies, message) :]


def _note_fork(requests: weakref.ref[Requests]) -> None:
    if (found := requests()) is not None:
        found._pid = os.getpid()


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (Linux)."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_on_death_of_parent(number: int) -> None:
    """Make the kernel send a signal to this process when the thread that started it ends."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


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


helpers: set[int] = set()
"""Children of this process that must outlive a check, such as those that start sandboxes."""


def end_descendants(keep: Collection[int] = ()) -> None:
    """Kill and reap every descendant of this process that is not in `keep`.

    Python's trackers of shared memory come last: once the processes that they serve have ended,
    they delete what these have left, and end.
    """
    begun = time.monotonic()
    while has_children() and (found := descendants(keep)):
        passed = time.monotonic() - begun
        if passed > _END_TIMEOUT_S:
            return
        doomed = found if passed > _TRACKERS_S else [p for p in found if not _is_tracker(p)]
        for pid in doomed:
            # It ended meanwhile, or runs as another user.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            # A grandchild: it is reparented to this process when its parent is gone.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:  # it ended meanwhile
        return False


def _supervise(child: int, requests: int, parent: int) -> NoReturn:
    """Wait until the program ends or must end, then end its process tree and exit as it did.

    The program must end on SIGTERM, or `GRACE_S` after the parent has closed its end of the pipe
    `requests` or has ended. Signal handlers and timers of the program have no effect here.

    Args:
        parent: pid of the process that started this one.
    """
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(wake, False)
    told: list[int] = []
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    # The pipe alone does not show the death of a parent that has forked: the copy holds it too.
    signal_on_death_of_parent(signal.SIGUSR1)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(requests, 0)  # a hang-up is always reported
    alone, deadline = False, float("inf")
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _exit_as(status)
        if deadline == float("inf") and (alone or os.getppid() != parent):
            deadline = time.monotonic() + GRACE_S
        if told or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _exit_as(os.waitpid(child, 0)[1])
        wait = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for descriptor, _ in poll.poll(wait if wait is None else 1000 * wait + 1):
            if descriptor == wake:
                os.read(wake, 4096)
            else:
                poll.unregister(requests)
                alone = True


def _exit_as(status: int) -> NoReturn:
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _load(target: str) -> Callable[[Requests], None]:
    """The function `serve` of a module or a file."""
    if not target.endswith(".py"):
        serve: Callable[[Requests], None] = importlib.import_module(target).serve
        return serve
    name = os.path.basename(target).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    serve = module.serve
    return serve


def main() -> None:
    """Become the supervisor, and fork a process to do the work."""
    parent, requests, replies = (int(argument) for argument in sys.argv[1:4])
    is_command = sys.argv[4] == COMMAND
    for descriptor in (requests, replies):
        # A program that TARGET starts must not keep the pipes open.
        os.set_inheritable(descriptor, is_command)
    adopt_orphans()
    supervisor = os.getpid()
    child = os.fork()
    if child:
        os.close(replies)
        _supervise(child, requests, parent)
    signal_on_death_of_parent(signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the call
        os._exit(1)
    if is_command:
        os.execvp(sys.argv[5], sys.argv[5:])
    incoming = Requests(requests, replies)
    try:
        _load(sys.argv[4])(incoming)
    except BrokenPipeError:  # the parent is gone
        pass
    except Exception:
        incoming.fail()
        raise


if __name__ == "__main__":
    main()
