"""Processes that check answers. Each can be killed without harm to the others.

`WorkerPool` takes single checks from an event loop and distributes them. `WorkerProcess` is a
handle on one process, which runs `worker.py`.

Invariants:

- Every check gets exactly one outcome, and no outcome reaches another check.
- Only the check that hangs or kills its process fails; the checks queued behind it go to the next
  process.
- A cancelled check gets no outcome. One that waits is dropped. One that runs in a process of its
  own has `CANCEL_GRACE_S` to end; then the process is ended as after a time-out. One that runs
  concurrently with others is cancelled in the process.
- Checks of async rewards run concurrently in one process, each with its own time limit. If the
  process ends, its checks run again, so an async check may run more than once (`AsyncLane`).
- Everything that a worker has started ends with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ..errors import UserError
from ..processes.child import ChildError, Message
from .checks import Cause, Check, Outcome
from .lanes import AsyncLane, Lane, SerialLane
from .worker_process import Job, RewardInfo, WorkerProcess


class WorkerPool:
    """Pool of processes that have loaded rewards.

    The pool serves one event loop at a time. When it is used from another loop, processes that are
    still busy for the old loop are ended.

    Args:
        specs: names of the rewards.
        workers: number of processes.
        timeout_s: maximum seconds per check.
    """

    def __init__(self, specs: Sequence[str], *, workers: int, timeout_s: float) -> None:
        self._specs = list(specs)
        self._processes = workers
        self._size = workers  # processes that run plain functions
        self._timeout_s = timeout_s
        self._workers: list[WorkerProcess] = []
        self._serial, self._async = SerialLane(workers), AsyncLane()
        self._rewards: list[RewardInfo] = []
        self._loading: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arriving = False

    def start(self) -> None:
        """Start missing processes without waiting: they load their rewards in the background."""
        missing = [False] * self._size + [True] * any(info.runs_async for info in self._rewards)
        for worker in self._workers:
            missing.remove(worker.concurrent)
        for concurrent in missing:
            self._spawn(concurrent)

    async def rewards(self) -> list[RewardInfo]:
        """The rewards, in the order of `specs`. Starts the pool and waits for the first process.

        Raises:
            UserError: if the rewards cannot be loaded.
        """
        loop = self._join()
        if not self._rewards:
            if self._loading is None:
                self._loading = loop.create_future()
            await asyncio.shield(self._loading)
        return self._rewards

    async def check(self, check: Check) -> Outcome:
        """Run one check. Checks that arrive in one iteration of the event loop share requests.

        Raises:
            UserError: if the rewards cannot be loaded.
        """
        rewards = self._rewards or await self.rewards()
        loop = self._join()
        job = Job(check, loop.create_future())
        (self._async if rewards[check.reward].runs_async else self._serial).put(job)
        if not self._arriving:
            self._arriving = True
            loop.call_soon(self._guarded, self._arrive)
        try:
            return await job.outcome
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.hurry(job)
                self._flush(worker)
            self._set_timer()
            raise

    def leave(self) -> None:
        """Leave the event loop. Processes that are still busy are ended.

        Raises:
            RuntimeError: if a check of this loop still waits.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if not loop.is_closed() and any(not job.outcome.done() for job in self._jobs()):
            self._loop = loop
            raise RuntimeError("the reward processes are in use by another event loop")
        self._serial, self._async = SerialLane(self._processes), AsyncLane()
        self._arriving, self._loading = False, None
        self._stop_timer()
        for worker in list(self._workers):
            worker.unwatch(loop)
            if worker.pending:
                self._end(worker)

    def close(self, grace_s: float = 1.0) -> None:
        """End every process. Checks that still wait are cancelled.

        The pool starts again when it is used again.
        """
        self._fail_all(None)
        self.leave()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.child.close(grace_s)

    def _join(self) -> asyncio.AbstractEventLoop:
        """Serve the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self.leave()
            self._loop = loop
            for worker in self._workers:
                self._watch(worker)
            self.start()
            self._set_timer()
        return loop

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a callback of the event loop. Its error reaches every check that waits."""
        try:
            step()
            self._send()
        except BaseException as error:
            self._fail_all(error)
            self.close(grace_s=0.0)
            if not isinstance(error, UserError):
                raise

    def _arrive(self) -> None:
        """The checks of this iteration of the event loop are there."""
        self._arriving = False
        self._serial.arrived()

    def _send(self) -> None:
        """Send checks to processes, and set the timer."""
        for worker in list(self._workers):
            lane = self._lane(worker)
            while worker.ready and (jobs := lane.next(worker)):
                if worker.child.process.poll() is not None and not worker.pending:
                    lane.again(jobs)  # it died while it had nothing to do
                    self._replace(worker, "process ended")
                    break
                worker.send(jobs)
            self._flush(worker)
        self._set_timer()

    def _flush(self, worker: WorkerProcess) -> None:
        """Send the rest of a request as soon as the process reads it."""
        if not worker.child.closed and not worker.child.flush() and self._loop:
            worker.watch_writing(self._loop)

    def _lane(self, worker: WorkerProcess) -> Lane:
        return self._async if worker.concurrent else self._serial

    def _jobs(self) -> list[Job]:
        """Checks without an outcome, and checks that were cancelled lately."""
        sent = [job for worker in self._workers for job in worker.pending.values()]
        return [*self._serial.waiting(), *self._async.waiting(), *sent]

    def _read(self, worker: WorkerProcess) -> None:
        """Handle messages of a process, or its death."""
        try:
            for message in worker.child.arrived():
                self._take(worker, message)
        except ChildError as error:
            self._replace(worker, f"process {error}")

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        if worker.ready:
            if answered := worker.answered(message):
                job, outcome = answered
                job.finish(outcome)
            return
        loaded = worker.load(message)
        if not self._rewards:
            self._rewards = loaded
            self._appoint(worker)
        if self._loading and not self._loading.done():
            self._loading.set_result(None)

    def _appoint(self, first: WorkerProcess) -> None:
        """Start a process for async rewards. If all are async, `first` is the only process."""
        if all(info.runs_async for info in self._rewards):
            first.concurrent, self._size = True, 0
            for worker in list(self._workers):
                if worker is not first:
                    self._end(worker)
        self.start()

    def _expire(self) -> None:
        """End the processes whose deadline has passed."""
        self._timer = None
        now = time.monotonic()
        for worker in list(self._workers):
            if now >= worker.deadline and not worker.idle:
                self._replace(worker, f"timeout after {self._timeout_s:g} s", "timeout")

    def _replace(self, worker: WorkerProcess, reason: str, cause: Cause = "died") -> None:
        """End a process and start another. Its running check fails for `reason`.

        Raises:
            UserError: if the process had not loaded the rewards.
        """
        self._end(worker)
        if not worker.ready:
            raise UserError(
                f"environment.rewards: a process that checks answers did not start ({reason})."
                f" Rewards: {', '.join(self._specs)}"
            )
        self.start()
        if worker.pending:
            late = cause == "timeout"
            failure = Outcome([], reason, self._timeout_s if late else 0.0, cause)
            self._lane(worker).lost(worker, failure)

    def _end(self, worker: WorkerProcess) -> None:
        """End a process."""
        self._workers.remove(worker)
        if self._loop:
            worker.unwatch(self._loop)
        worker.child.close(grace_s=0.0)

    def _fail_all(self, error: BaseException | None) -> None:
        """End all waiting checks with an error. None, or an error that is not theirs: cancel."""
        waiting: list[asyncio.Future[Outcome] | asyncio.Future[None]]
        waiting = [job.outcome for job in self._jobs()]
        if self._loading:
            waiting.append(self._loading)
        if self._loop is None or self._loop.is_closed():
            return
        for future in waiting:
            if future.done():
                continue
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # nobody may wait for it any more
            else:
                future.cancel()

    def _spawn(self, concurrent: bool) -> None:
        worker = WorkerProcess(self._specs, self._timeout_s, concurrent)
        self._workers.append(worker)
        self._watch(worker)

    def _watch(self, worker: WorkerProcess) -> None:
        if self._loop:
            self._loop.add_reader(worker.child.replies, self._guarded, lambda: self._read(worker))

    def _set_timer(self) -> None:
        """Wake up at the earliest deadline. Deadlines that have moved back are found then."""
        deadlines = [worker.deadline for worker in self._workers if not worker.idle]
        if not deadlines or self._loop is None:
            return
        wait = max(0.0, min(deadlines) - time.monotonic())
        if self._timer is None or self._timer.when() > self._loop.time() + wait:
            self._stop_timer()
            self._timer = self._loop.call_later(wait, self._guarded, self._expire)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer:
            timer.cancel()
