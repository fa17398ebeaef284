"""Run jobs in cells that were started before they were needed."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import Self

from sixfold.checks.limits import Level, allowed

from .cells import Cell, CellError, LauncherProcess
from .isolation import detect_isolation, require_isolation
from .job import Ended, Job, Limits

_ATTEMPTS = 3
_MOST_SLOTS, _MOST_IDLE = 64, 16  # a cell needs eight of the descriptors that a process may open


class Sandbox:
    """Runs untrusted programs.

    Every job runs in a cell of its own, which ends with the job. A few cells wait with an
    interpreter that has started, and are replaced in the background.

    Use it from one event loop at a time. It ends with this process, also if that is killed.

    Args:
        isolation: weakest level that is allowed. None: that of this process (`levels.allow`).
        slots: number of jobs that run at the same time; the others wait. 0: one per core, up to 64.
        scratch_mb: size of the scratch folder in waiting cells. A job with another size starts a
            cell of its own.

    Raises:
        UserError: if the machine cannot give the level.
    """

    def __init__(
        self,
        isolation: Level | None = None,
        *,
        slots: int = 0,
        scratch_mb: int = Limits().scratch_mb,
    ) -> None:
        found = detect_isolation()
        require_isolation(isolation or allowed(), found)
        self.isolation = found.level
        self._setup = found.setup
        self._slots = slots or min(len(os.sched_getaffinity(0)), _MOST_SLOTS)
        self._scratch_mb = scratch_mb
        self._launcher: LauncherProcess | None = None
        self._idle: deque[Cell] = deque()
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def run(self, job: Job) -> Ended:
        """Run a program that is installed in the sandbox, or is a file of the job.

        A failure of the sandbox itself has the verdict "infrastructure_error". Cancelling the call
        kills the job.
        """
        return await self._run(job, python=False)

    async def run_python(self, job: Job) -> Ended:
        """Run a Python file of the job in an interpreter that has started.

        The first entry of `job.argv` is the file. Apart from the time to start, this is the same as
        `run` with `python3 FILE`.
        """
        return await self._run(job, python=True)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    async def _run(self, job: Job, python: bool) -> Ended:
        await self._enter()
        try:
            began = time.monotonic()
            reason = ""
            for _ in range(_ATTEMPTS):
                try:
                    cell = await self._cell(job.limits.scratch_mb)
                except CellError as error:
                    reason = str(error)
                    continue
                try:
                    return await cell.run(job, python, self.isolation)
                except CellError as error:
                    reason = str(error)
                    break
                finally:
                    cell.close()
            seconds = time.monotonic() - began
            return Ended("infrastructure_error", None, b"", b"", seconds, self.isolation, reason)
        finally:
            self._leave()

    async def _cell(self, scratch_mb: int) -> Cell:
        """A cell that is ready.

        Raises:
            CellError: if it does not start.
        """
        if self._launcher is None or not self._launcher.alive:
            self.close()
            self._launcher = LauncherProcess(self._setup)
        same = scratch_mb == self._scratch_mb
        cell = self._idle.popleft() if same and self._idle else None
        if cell is None:
            cell = self._launcher.open_cell(scratch_mb)
        while same and len(self._idle) < min(self._slots, _MOST_IDLE):
            self._idle.append(self._launcher.open_cell(scratch_mb))
        try:
            await cell.ready()
        except BaseException:
            cell.close()
            raise
        return cell

    async def _enter(self) -> None:
        while self._running >= self._slots:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
