"""Checks wait for processes that can be killed without harm to the others.

`WorkerPool` takes single checks from an event loop. Plain functions run one at a time per process
(`SerialQueue`). Async functions run concurrently in one process (`AsyncQueue`). `WorkerProcess` is
a handle on one process, which runs `worker.py`.

Invariants:

- Every check gets exactly one outcome, and no outcome reaches another check.
- Only the check that hangs or kills its process fails; the checks queued behind it go to the next
  process.
- A cancelled check gets no outcome. One that waits is dropped. One that runs in a process of its
  own has `CANCEL_GRACE_S` to end; then the process is ended as after a time-out. One that runs
  concurrently with others is cancelled in the process.
- Checks of async rewards run concurrently in one process, each with its own time limit. If the
  process ends, its checks run again, so an async check may run more than once (`AsyncQueue`).
- Everything that a worker has started ends with it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..environment.grade import Grade
from ..errors import UserError
from ..processes.child import ChildError, Message
from .check import Cause, Check, Outcome, RewardInfo
from .process import Job, WorkerProcess

CHECKS_PER_REQUEST = 128
CONCURRENT_CHECKS = 256
"""Maximum number of async checks in flight."""


class CheckQueue(ABC):
    """Checks of one kind that wait for a process. Cancelled ones are dropped."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()

    def put(self, job: Job) -> None:
        self._waiting.append(job)

    def requeue(self, jobs: Iterable[Job]) -> None:
        """Put checks that no process has begun back to the front."""
        self._waiting.extendleft(reversed(list(jobs)))

    def waiting(self) -> Iterator[Job]:
        """Checks that no process has."""
        yield from self._waiting

    @abstractmethod
    def take(self, worker: WorkerProcess) -> list[Job]:
        """Remove the checks that `worker` should be sent now. It has loaded the rewards."""

    @abstractmethod
    def on_worker_death(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Handle the pending checks of a process that has ended."""

    def _take(self, most: int) -> list[Job]:
        """Remove up to `most` checks from the front. Cancelled checks are dropped."""
        jobs: list[Job] = []
        while self._waiting and len(jobs) < most:
            job = self._waiting.popleft()
            if not job.outcome.done():
                jobs.append(job)
        return jobs


class SerialQueue(CheckQueue):
    """Checks that run one after another. The first pending one is to blame if a process ends."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self._processes = processes
        self._share = 1  # checks per request

    def flush(self) -> None:
        """All checks of one iteration of the event loop are there. Choose how many checks a request
        holds: so many that every process gets some.
        """
        self._share = max(1, min(CHECKS_PER_REQUEST, len(self._waiting) // (2 * self._processes)))

    def take(self, worker: WorkerProcess) -> list[Job]:
        """Checks of one request, if the process is idle."""
        return [] if worker.pending else self._take(self._share)

    def on_worker_death(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Fail the running check. The others run again.

        A time-out of a check that blames the answer is not a failure: the answer earns 0. The death
        of a process is always one, because something else may have killed it.
        """
        first, *behind = worker.pending.values()
        if worker.blames_answer and failure.cause == "timeout":
            grade = Grade(0.0, "timeout", failure.error or "")
            failure = Outcome([grade] * len(first.check.completions), None, failure.seconds)
        first.finish(failure)
        self.requeue(behind)


class AsyncQueue(CheckQueue):
    """Checks that run concurrently in one process.

    If the process ends, any of its checks may be to blame. They are the suspects: each half of them
    runs again, without other checks. A half that ends its process is halved again. So a check fails
    only if the process ended while it was the only one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._suspects: deque[list[Job]] = deque()
        self._alone = False  # suspects run

    def waiting(self) -> Iterator[Job]:
        yield from super().waiting()
        for suspects in self._suspects:
            yield from suspects

    def take(self, worker: WorkerProcess) -> list[Job]:
        """A set of suspects if the process is idle; new checks if there are no suspects."""
        while self._suspects and not worker.pending:
            if jobs := [job for job in self._suspects.popleft() if not job.outcome.done()]:
                self._alone = True
                return jobs
        if self._suspects or (self._alone and worker.pending):
            return []
        self._alone = False
        room = CONCURRENT_CHECKS - len(worker.pending)
        return self._take(min(room, CHECKS_PER_REQUEST))

    def on_worker_death(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Fail a check that was alone. Otherwise halve the suspects."""
        jobs = [job for job in worker.pending.values() if not job.outcome.done()]
        half = len(jobs) // 2
        if half:
            self._suspects.extend((jobs[:half], jobs[half:]))
        for job in jobs if not half else ():
            job.finish(failure)


class WorkerPool:
    """Pool of processes that have loaded rewards.

    The pool serves one event loop at a time. When it is used from another loop, processes that are
    still busy for the old loop are ended.

    Args:
        specs: names of the rewards. Without any, no process starts.
        workers: number of processes.
        timeout_s: maximum seconds per check.
        output: descriptor for what the processes print. None: as this process.
    """

    def __init__(
        self, specs: Sequence[str], *, workers: int, timeout_s: float, output: int | None = None
    ) -> None:
        self._specs = list(specs)
        self._processes = workers
        self._size = workers if specs else 0  # processes that run plain functions
        self._timeout_s = timeout_s
        self._output = output
        self._workers: list[WorkerProcess] = []
        self._serial, self._async = SerialQueue(workers), AsyncQueue()
        self._rewards: list[RewardInfo] = []
        self._loading: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False

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
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._guarded, self._flush)
        try:
            return await job.outcome
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.cancel(job)
                self._write(worker)
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
        self._serial, self._async = SerialQueue(self._processes), AsyncQueue()
        self._flushing, self._loading = False, None
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

    def _flush(self) -> None:
        """The checks of this iteration of the event loop are there."""
        self._flushing = False
        self._serial.flush()

    def _send(self) -> None:
        for worker in list(self._workers):
            queue = self._queue(worker)
            while worker.ready and (jobs := queue.take(worker)):
                if worker.child.process.poll() is not None and not worker.pending:
                    queue.requeue(jobs)  # it died while it had nothing to do
                    self._replace(worker, "process ended")
                    break
                worker.send(jobs)
            self._write(worker)
        self._set_timer()

    def _write(self, worker: WorkerProcess) -> None:
        """Send the rest of a request as soon as the process reads it."""
        if not worker.child.closed and not worker.child.flush() and self._loop:
            worker.watch_writing(self._loop)

    def _queue(self, worker: WorkerProcess) -> CheckQueue:
        return self._async if worker.concurrent else self._serial

    def _jobs(self) -> list[Job]:
        """Checks without an outcome, and checks that were cancelled lately."""
        sent = [job for worker in self._workers for job in worker.pending.values()]
        return [*self._serial.waiting(), *self._async.waiting(), *sent]

    def _read(self, worker: WorkerProcess) -> None:
        try:
            for message in worker.child.arrived():
                self._take(worker, message)
        except ChildError as error:
            self._replace(worker, f"process {error}")

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        if worker.ready:
            if answered := worker.read_answer(message):
                job, outcome = answered
                job.finish(outcome)
            return
        loaded = worker.load(message)
        if not self._rewards:
            self._rewards = loaded
            self._start_async_process(worker)
        if self._loading and not self._loading.done():
            self._loading.set_result(None)

    def _start_async_process(self, first: WorkerProcess) -> None:
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
        """End a process and start another. Its running check fails for `reason`."""
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
            self._queue(worker).on_worker_death(worker, failure)

    def _end(self, worker: WorkerProcess) -> None:
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
        worker = WorkerProcess(self._specs, self._timeout_s, concurrent, self._output)
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
