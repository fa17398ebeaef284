"""Cells from the owner's side: start one, give it a job, and read its output.

The owner reads all output itself, up to a limit, and believes nothing that a cell says about its
job. Time, memory and the end of the processes are the launcher's concern (`launcher.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from sixfold.processes.child import Child, ChildError
from sixfold.processes.program import helpers
from sixfold.types import Verdict

from .command import Setup
from .job import Ended, Job, Limits
from .launcher import DESCRIPTORS
from .streams import Streams
from .watch import MOST_DESCRIPTORS

START_TIMEOUT_S = 30.0  # a busy machine starts processes slowly
_LATE_S = 15.0  # after its wall limit a job is lost: its launcher hangs
_SIGXCPU, _SIGKILL = 24, 9
_MEMORY_ERRORS = (b"MemoryError", b"std::bad_alloc", b"heap out of memory", b"out of memory")


class CellError(Exception):
    """The sandbox failed, not the job."""


class LauncherProcess:
    """Handle on the process that starts cells.

    Raises:
        CellError: if the process does not start.
    """

    def __init__(self, setup: Setup) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = Child(
                "sixfold_environments.sandbox.launcher", descriptors=(theirs.fileno(),)
            )
            helpers.add(self._child.process.pid)
            try:
                request = {"setup": asdict(setup), "socket": theirs.fileno()}
                self._child.send(json.dumps(request).encode(), START_TIMEOUT_S)
                answer = json.loads(self._child.receive(START_TIMEOUT_S))
            except ChildError as error:
                self.close()
                raise CellError(f"the launcher of the sandbox: {error}") from error
        self.setup = Setup(**answer)

    @property
    def alive(self) -> bool:
        """False if the process has ended."""
        return not self._child.closed and self._child.process.poll() is None

    def open_cell(self, scratch_mb: int) -> Cell:
        """Start a cell. Returns at once; the cell starts in the background.

        Raises:
            CellError: if the launcher has ended, or if too many descriptors are open.
        """
        try:
            cell = Cell(scratch_mb)
        except OSError as error:
            raise CellError(f"cannot open a cell: {error}") from error
        try:
            request = json.dumps({"scratch_bytes": scratch_mb << 20}).encode()
            numbers = [cell.theirs[name] for name in DESCRIPTORS]
            socket.send_fds(self._requests, [request], numbers)
        except OSError as error:
            cell.close()
            raise CellError("the launcher of the sandbox has ended") from error
        finally:
            for number in cell.theirs.values():
                os.close(number)
        return cell

    def close(self) -> None:
        self._requests.close()
        self._child.close()
        helpers.discard(self._child.process.pid)


class Cell:
    """One single-use process in a sandbox. Closing it ends all its processes.

    Args:
        scratch_mb: size of its scratch folder, in MiB.

    Attributes:
        theirs: descriptors for the launcher. They are closed when it has them.
    """

    def __init__(self, scratch_mb: int) -> None:
        self.scratch_mb = scratch_mb
        self._control, control = socket.socketpair()
        self._life, life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, self._life):
            end.setblocking(False)
        stdin, self._stdin = os.pipe()
        self._outputs, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        for descriptor in (self._stdin, *self._outputs):
            os.set_blocking(descriptor, False)
        self._open = [self._stdin, *self._outputs]
        self.theirs = dict(
            zip(
                DESCRIPTORS,
                (control.detach(), stdin, *theirs, life.detach()),
                strict=True,
            )
        )
        self._folders: list[int] = []
        self._ready = False

    def close(self) -> None:
        """End the cell. Does not wait for it."""
        self._life.close()
        self._control.close()
        while self._open:
            os.close(self._open.pop())
        while self._folders:
            os.close(self._folders.pop())

    async def ready(self) -> None:
        """Wait until the agent runs.

        Raises:
            CellError: if it does not start.
        """
        if self._ready:
            return
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _readable(self._control)
            word, self._folders, _, _ = socket.recv_fds(
                self._control, 1, 2, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise CellError("the cell did not start in time") from error
        except OSError as error:
            raise CellError(f"the cell did not start: {error}") from error
        if word != b"R":
            raise CellError(f"the cell did not start: {self._complaint()}")
        self._ready = True

    async def run(self, job: Job, python: bool, isolation: str) -> Ended:
        """Run a job. The cell must be ready, and is of no use afterwards.

        Args:
            python: run a Python file in the interpreter that waits in the cell.
            isolation: level in force, for the answer.

        Raises:
            CellError: if the sandbox failed.
        """
        streams = Streams(self._outputs, self._stdin, job.stdin, job.limits.output_bytes, self._end)
        self._open.clear()  # they belong to `streams` now
        try:
            async with asyncio.timeout(job.limits.wall_s + _LATE_S):
                socket.send_fds(self._life, [_limits_message(job.limits)], self._folders)
                handed = asyncio.ensure_future(self._hand_over(job, python, isolation))
                try:
                    await _readable(self._life)
                    # Nothing of the cell is left, so its end of the socket is closed.
                    refusal = await handed
                finally:
                    handed.cancel()
            report = self._life.recv(1 << 16)
            streams.drain()
        except (TimeoutError, OSError) as error:
            raise CellError(f"the launcher of the sandbox does not answer: {error}") from error
        finally:
            streams.close()
        if not report:
            raise CellError("the launcher of the sandbox has ended")
        if refusal:
            raise CellError(refusal)
        return _judge(job, json.loads(report), streams, isolation)

    def _end(self) -> None:
        """Ask the launcher to end the cell. It answers when that is done."""
        with suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    async def _hand_over(self, job: Job, python: bool, isolation: str) -> str:
        """Send the job to the agent. Returns the agent's reason if it cannot run it."""
        loop = asyncio.get_running_loop()
        header = {
            "argv": job.argv,
            "python": python,
            "files": [(name, len(content)) for name, content in job.files.items()],
            "limits": _resource_limits(job.limits, isolation),
        }
        body = json.dumps(header).encode()
        message = b"".join([len(body).to_bytes(8, "big"), body, *job.files.values()])
        answer = b""
        with suppress(ConnectionError):  # the cell was killed
            await loop.sock_sendall(self._control, message)
            while len(answer) < 4096 and (part := await loop.sock_recv(self._control, 4096)):
                answer += part
        refusal = answer.removeprefix(b"S")
        return refusal[1:].decode(errors="replace") if refusal[:1] == b"E" else ""

    def _complaint(self) -> str:
        """What bubblewrap has printed."""
        with suppress(BlockingIOError):
            return os.read(self._outputs[1], 4096).decode(errors="replace").strip()
        return "no reason given"


def _limits_message(limits: Limits) -> bytes:
    """Message to the launcher: the limits that it watches."""
    return json.dumps(
        {
            "began": time.monotonic(),
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_mb << 20,
            "processes": limits.processes,
            "files": limits.files,
        }
    ).encode()


def _resource_limits(limits: Limits, isolation: str) -> dict[str, tuple[int, int]]:
    """Limits that the kernel keeps for each process.

    The launcher watches the sum of memory in use. So the limits of address space leave room for
    what a program reserves and does not use. Without namespaces nobody watches.
    """
    memory = limits.memory_mb << 20
    watched = isolation == "namespaces"
    data, space = (2 * memory, 16 * memory) if watched else (memory, 2 * memory)
    each = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_DATA": data,
        "RLIMIT_AS": space,
        "RLIMIT_FSIZE": limits.scratch_mb << 20,
        "RLIMIT_NOFILE": MOST_DESCRIPTORS,
        "RLIMIT_CORE": 1,
    }
    found = {name: (value, value) for name, value in each.items()}
    found["RLIMIT_CPU"] = (limits.cpu_seconds, limits.cpu_seconds + 1)
    if watched:  # outside a user namespace it would count all processes of the user
        found["RLIMIT_NPROC"] = (limits.processes + 1, limits.processes + 1)
    return found


def _judge(job: Job, report: dict[str, Any], streams: Streams, isolation: str) -> Ended:
    code = report["code"]
    verdict: Verdict = "passed" if code == 0 else "runtime_error"
    detail = "" if code == 0 else f"ended with exit code {code}"
    exit_code: int | None = code
    spent = report["seconds"] >= job.limits.cpu_seconds
    if streams.full:
        verdict, exit_code = "output_limit", None
        detail = f"more than {job.limits.output_bytes} bytes of output"
    elif report["why"]:
        verdict, detail = report["why"], report["detail"]
        exit_code = None
    elif code == 128 + _SIGXCPU or (code == 128 + _SIGKILL and spent):
        verdict, detail = "timeout", f"used more than {job.limits.cpu_seconds} CPU seconds"
    elif code and any(word in streams.output(1)[-4096:] for word in _MEMORY_ERRORS):
        verdict, detail = "out_of_memory", "an allocation failed"
    return Ended(
        verdict,
        exit_code,
        streams.output(0),
        streams.output(1),
        report["seconds"],
        isolation,
        detail,
        streams.output(2),
    )


async def _readable(end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not found.done():
            found.set_result(None)

    loop.add_reader(end, tell)
    try:
        await found
    finally:
        loop.remove_reader(end)
