"""Order of checks: the next ones for a process, and those that run again when it has ended.

Plain functions run one at a time per process (`SerialLane`). Async functions run concurrently in
one process (`AsyncLane`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from .checks import Outcome
from .grade import Grade
from .worker_process import Job, WorkerProcess

CHECKS_PER_REQUEST = 128
CONCURRENT_CHECKS = 256
"""Maximum number of async checks in flight."""


class Lane(Protocol):
    """Waiting checks of one kind. Checks that are cancelled meanwhile are left out."""

    def put(self, job: Job) -> None:
        """Add a check."""

    def arrived(self) -> None:
        """All checks of one iteration of the event loop are there."""

    def next(self, worker: WorkerProcess) -> list[Job]:
        """Remove the checks that `worker` should be sent now. It has loaded the rewards."""
        ...

    def again(self, jobs: Iterable[Job]) -> None:
        """Put back checks that no process has begun."""

    def lost(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Handle the pending checks of a process that has ended.

        Args:
            worker: the process.
            failure: outcome of the check that is to blame.
        """

    def waiting(self) -> Iterator[Job]:
        """Checks that no process has."""
        ...


class SerialLane:
    """Checks that run one after another. The first pending one is to blame if a process ends.

    Args:
        processes: number of processes.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._queue: deque[Job] = deque()
        self._share = 1  # checks per request

    def put(self, job: Job) -> None:
        """Add a check."""
        self._queue.append(job)

    def arrived(self) -> None:
        """Choose how many checks a request holds: so many that every process gets some."""
        self._share = max(1, min(CHECKS_PER_REQUEST, len(self._queue) // (2 * self._processes)))

    def next(self, worker: WorkerProcess) -> list[Job]:
        """Checks of one request, if the process is idle."""
        return [] if worker.pending else _take(self._queue, self._share)

    def again(self, jobs: Iterable[Job]) -> None:
        """Put checks back to the front."""
        self._queue.extendleft(reversed(list(jobs)))

    def lost(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Fail the running check. The others run again.

        A time-out of a check that blames the answer is not a failure: the answer earns 0. The death
        of a process is always one, because something else may have killed it.
        """
        first, *behind = worker.pending.values()
        if worker.blames_answer and failure.cause == "timeout":
            grade = Grade(0.0, "timeout", failure.error or "")
            failure = Outcome([grade] * len(first.check.completions), None, failure.seconds)
        first.finish(failure)
        self.again(behind)

    def waiting(self) -> Iterator[Job]:
        """Checks that no process has."""
        return iter(self._queue)


class AsyncLane:
    """Checks that run concurrently in one process.

    If the process ends, any of its checks may be to blame. They are the suspects: each half of them
    runs again, without other checks. A half that ends its process is halved again. So a check fails
    only if the process ended while it was the only one.
    """

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()
        self._suspects: deque[list[Job]] = deque()
        self._alone = False  # suspects run

    def put(self, job: Job) -> None:
        """Add a check."""
        self._queue.append(job)

    def arrived(self) -> None:
        """Nothing to do: requests have a fixed size."""

    def next(self, worker: WorkerProcess) -> list[Job]:
        """A set of suspects if the process is idle; new checks if there are no suspects."""
        while self._suspects and not worker.pending:
            if jobs := [job for job in self._suspects.popleft() if not job.outcome.done()]:
                self._alone = True
                return jobs
        if self._suspects or (self._alone and worker.pending):
            return []
        self._alone = False
        room = CONCURRENT_CHECKS - len(worker.pending)
        return _take(self._queue, min(room, CHECKS_PER_REQUEST))

    def again(self, jobs: Iterable[Job]) -> None:
        """Put checks back to the front."""
        self._queue.extendleft(reversed(list(jobs)))

    def lost(self, worker: WorkerProcess, failure: Outcome) -> None:
        """Fail a check that was alone. Otherwise halve the suspects."""
        jobs = [job for job in worker.pending.values() if not job.outcome.done()]
        half = len(jobs) // 2
        if half:
            self._suspects.extend((jobs[:half], jobs[half:]))
        for job in jobs if not half else ():
            job.finish(failure)

    def waiting(self) -> Iterator[Job]:
        """Checks that no process has."""
        yield from self._queue
        for suspects in self._suspects:
            yield from suspects


def _take(queue: deque[Job], most: int) -> list[Job]:
    """Remove up to `most` checks from the front. Cancelled checks are dropped."""
    jobs: list[Job] = []
    while queue and len(jobs) < most:
        job = queue.popleft()
        if not job.outcome.done():
            jobs.append(job)
    return jobs
