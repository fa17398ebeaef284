"""The process that starts and ends cells (a program of `processes/program.py`).

It is small, so that forks are fast, and it does nothing else, so that a limit is kept even while
the process of the rewards is busy. Everything below it ends with it: the kernel kills a cell with
its launcher, and the supervisor above it kills what is left.

Requests come over a Unix socket with message boundaries. Each is a JSON object with the descriptors
of one cell: control socket, standard input, output and error, result, and life. The cell lives
until the other end of `life` is closed. Messages over `life`:

- to the launcher: {"began", "wall_s", "memory_bytes", "processes", "files"} with the descriptors
  that the agent has sent: the job begins, and its limits hold from now on
- from the launcher, when no process of the cell is left: {"code": exit code, "why": limit that was
  exceeded or "", "detail": text, "seconds": wall time}
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from sixfold.processes.program import Requests, adopt_orphans, end_descendants

from .command import Setup, agent_command, cell_command, variables
from .seccomp import seccomp_filter
from .watch import Watch

NOBODY = 65534
TICK_S = 0.02  # interval of the checks of memory, processes and files
KILL_GRACE_S = 1.0
DESCRIPTORS = ("control", "stdin", "stdout", "stderr", "result", "life")
_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE, _CLONE_NEWNS = 4096, 16384, 1 << 18, 0x20000
_PLACES = ("/mnt", "/media", "/srv")
_LIBC = ctypes.CDLL(None, use_errno=True)


class Cell:
    """A cell as the launcher sees it.

    Attributes:
        pid: its first process: bubblewrap, or the keeper of a cell without namespaces.
        watch: limits of the job. None before it begins.
        why: limit that was exceeded.
        kept: True if a keeper ends its processes.
    """

    def __init__(self, pid: int, life: socket.socket, kept: bool) -> None:
        self.pid = pid
        self.kept = kept
        self.life = life
        self.watch: Watch | None = None
        self.why, self.detail = "", ""
        self.killed_at: float | None = None

    def heard(self) -> None:
        """Read what the owner has sent: the limits of the job, or the end."""
        if not self._began():
            self.kill()

    def _began(self) -> bool:
        """Read the message with which the job begins. False if there is another or none."""
        try:
            body, descriptors = _receive(self.life, 2)
        except OSError:
            return False
        if not body or self.watch:
            return False
        if self.kept:  # its /proc is that of the host
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
        self.watch = Watch(json.loads(body), descriptors)
        return True

    def enforce_limits(self, now: float) -> None:
        """Kill the cell if its job has exceeded a limit."""
        if self.killed_at is not None:
            if now > self.killed_at + KILL_GRACE_S:
                _signal(self.pid, signal.SIGKILL)
        elif self.watch and (exceeded := self.watch.exceeded(now)):
            self.why, self.detail = exceeded
            self.kill()

    def kill(self) -> None:
        if self.killed_at is not None:
            return
        self.killed_at = time.monotonic()
        if self.kept:
            _signal(self.pid, signal.SIGTERM)
            return
        # bubblewrap ends after its init, and that after all other processes of the cell.
        for pid in _children(self.pid) or [self.pid]:
            _signal(pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """Tell the owner that no process is left."""
        if self.watch is None:
            # The job began and ended since the last look. A message that nobody reads would reset
            # the connection, and the owner would not get the report.
            self._began()
        code = os.waitstatus_to_exitcode(status)
        report: dict[str, Any] = {"code": code if code >= 0 else 128 - code, "seconds": 0.0}
        if self.watch:
            report["seconds"] = time.monotonic() - self.watch.began
            if not self.why and self.killed_at is None:
                self.why, self.detail = self.watch.left_behind()
            self.watch.close()
        report |= {"why": self.why, "detail": self.detail}
        with suppress(OSError):  # the owner does not wait for it
            self.life.send(json.dumps(report).encode())
        self.life.close()


class Launcher:
    """All cells of an owner."""

    def __init__(self, requests: socket.socket, setup: Setup) -> None:
        self._requests = requests
        self._setup = setup
        self._filter = seccomp_filter(platform.machine())
        self._cells: dict[int, Cell] = {}  # by descriptor of `life`
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._wake, waker = os.pipe()
        for end in (self._wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._poll.register(self._wake, select.POLLIN)

    def serve(self) -> None:
        """Start and watch cells until the owner hangs up."""
        while True:
            busy = any(cell.watch or cell.killed_at for cell in self._cells.values())
            for descriptor, _ in self._poll.poll(1000 * TICK_S if busy else None):
                if descriptor == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif descriptor in self._cells:
                    self._cells[descriptor].heard()
                    if self._cells[descriptor].killed_at is not None:
                        self._poll.unregister(descriptor)
                elif not self._start():
                    return
            self._reap()
            now = time.monotonic()
            for cell in self._cells.values():
                cell.enforce_limits(now)

    def _start(self) -> bool:
        """Start the cell of one request. False if the owner has hung up."""
        body, descriptors = _receive(self._requests, len(DESCRIPTORS))
        if not body:
            return False
        request = json.loads(body)
        given = dict(zip(DESCRIPTORS, descriptors, strict=True))
        life = socket.socket(fileno=given.pop("life"))
        scratch = "" if self._setup.bwrap else tempfile.mkdtemp(prefix="sixfold-sandbox-")
        filtered = _pipe_of(self._filter) if self._setup.bwrap and self._filter else None
        pid = os.fork()
        if not pid:
            life.close()
            _become(self._setup, given, filtered, request["scratch_bytes"], scratch)
        for descriptor in given.values():
            os.close(descriptor)
        if filtered is not None:
            os.close(filtered)
        self._cells[life.fileno()] = Cell(pid, life, bool(scratch))
        self._poll.register(life, select.POLLIN)
        return True

    def _reap(self) -> None:
        ended: list[tuple[int, int]] = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(found)
        if not ended:
            return
        self._end_orphans()
        for pid, status in ended:
            for descriptor, cell in list(self._cells.items()):
                if cell.pid == pid:
                    with suppress(KeyError):
                        self._poll.unregister(descriptor)
                    cell.ended(status)
                    del self._cells[descriptor]

    def _end_orphans(self) -> None:
        """Kill what a killed bubblewrap has left: an init that was not yet bound to its life."""
        known = {cell.pid for cell in self._cells.values()}
        for pid in set(_children(os.getpid())) - known:
            _signal(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def serve(requests: Requests) -> None:
    """Serve the owner. Its first and only request has the setup and the descriptor of a socket."""
    given = json.loads(next(requests))
    setup = reachable(Setup(**given["setup"]))
    adopt_orphans()
    _forbid_core_dumps()
    requests.answer(json.dumps(asdict(setup)).encode())
    with socket.socket(fileno=given["socket"]) as owner:
        os.set_inheritable(owner.fileno(), False)
        Launcher(owner, setup).serve()


def reachable(setup: Setup) -> Setup:
    """The setup with paths that nobody may use.

    Root's Python is often below /root, which other users may not enter. The launcher then mounts
    what a cell needs at a public place, in a mount namespace of its own that ends with it. Where it
    may not mount, cells run as the user of the run.
    """
    if not setup.drops_user:
        return setup
    tools = os.path.dirname(os.path.dirname(os.path.dirname(setup.bwrap))) if setup.bwrap else ""
    wanted = {"python": setup.prefix, "tools": tools, "agent": os.path.dirname(setup.agent)}
    hidden = {name: path for name, path in wanted.items() if path and not _public(path)}
    if not hidden:
        return setup
    places = [place for place in _PLACES if os.path.isdir(place) and _public(place)]
    if not places or not _mount_at(places[0], hidden):
        return Setup(**{**asdict(setup), "drops_user": False})
    moved = {name: f"{places[0]}/{name}" if name in hidden else wanted[name] for name in wanted}
    bwrap = setup.bwrap and moved["tools"] + setup.bwrap.removeprefix(tools)
    return Setup(
        **{
            **asdict(setup),
            "prefix": moved["python"],
            "bwrap": bwrap,
            "agent": f"{moved['agent']}/{os.path.basename(setup.agent)}",
        }
    )


def _forbid_core_dumps() -> None:
    """Forbid core dumps, also those that the kernel pipes to a program of the host.

    A limit of 0 does not stop the latter; a limit of one byte does, see core(5).
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    with suppress(ValueError):  # the hard limit is 0 already
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1) if hard else (0, 0))


def _public(path: str) -> bool:
    """True if every user may enter the folder."""
    path = os.path.realpath(path)
    return os.stat(path).st_mode & 0o5 == 0o5 and (path == "/" or _public(os.path.dirname(path)))


def _mount_at(place: str, folders: dict[str, str]) -> bool:
    """Mount folders below `place`, visible only to this process. False if that is refused."""

    def mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> bool:
        words = [word and word.encode() for word in (source, target, kind)]
        return _LIBC.mount(*words, ctypes.c_ulong(flags), data and data.encode()) == 0

    if _LIBC.unshare(_CLONE_NEWNS) or not mount("none", "/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    # Open them now: `place` may hide them, and a mount of the old namespace cannot be bound.
    opened = {name: os.open(path, os.O_RDONLY) for name, path in folders.items()}
    done = mount("tmpfs", place, "tmpfs", 0, "mode=755,size=64k")
    for name, descriptor in opened.items():
        if done:
            os.mkdir(f"{place}/{name}")
            done = mount(f"/proc/self/fd/{descriptor}", f"{place}/{name}", None, _MS_BIND, None)
        os.close(descriptor)
    return done


def _become(
    setup: Setup, given: dict[str, int], filtered: int | None, scratch_bytes: int, scratch: str
) -> NoReturn:
    """Turn this fork into the first process of a cell. Does not return."""
    try:
        launcher = os.getppid()
        os.setsid()
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(given[name], number)
        signal.set_wakeup_fd(-1)
        for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signal_number, signal.SIG_DFL)
        # Of all processes of the machine, the kernel should kill this one when memory is short.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        control, result = given["control"], given["result"]
        inherited = [number for number in (control, result, filtered) if number is not None]
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        os.chdir("/")
        if scratch:
            _keep(setup, control, result, scratch, launcher)
        if setup.drops_user:
            _drop_user()
        _end_with_parent(signal.SIGKILL, launcher)
        command = cell_command(setup, control, result, filtered, scratch_bytes)
        os.execve(command[0], command, {})
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"cannot start a cell: {error}".encode())
    finally:
        os._exit(1)


def _keep(setup: Setup, control: int, result: int, scratch: str, launcher: int) -> NoReturn:
    """Keep a cell without namespaces: start the agent, wait for its end, end its descendants."""

    def clean(code: int) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(code)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: clean(128 + signal.SIGKILL))
    _end_with_parent(signal.SIGTERM, launcher)
    adopt_orphans()
    if setup.drops_user:
        os.chown(scratch, NOBODY, NOBODY)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.chdir(scratch)
        if setup.drops_user:
            _drop_user()
        command = agent_command(setup.prefix, setup.agent, control, result, scratch)
        os.execve(command[0], command, variables(setup, setup.prefix, scratch))
    os.close(control)
    for number in (0, 1, 2, result):
        os.close(number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    clean(code if code >= 0 else 128 - code)


def _drop_user() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _end_with_parent(number: int, launcher: int) -> None:
    """Get a signal when the launcher ends. After `_drop_user`, which would reset it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _receive(end: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receive a message with up to `most` descriptors, which no started program inherits."""
    body, descriptors, _, _ = socket.recv_fds(
        end, _MESSAGE_BYTES, most, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    return body, descriptors


def _pipe_of(content: bytes) -> int:
    """Reading end of a pipe that holds `content`."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading


def _children(pid: int) -> list[int]:
    """Children of a process with one thread."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
