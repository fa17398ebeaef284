"""Processes that check answers. Each can be killed without harm to the others.

`WorkerPool` distributes checks and reads outcomes. `_Worker` is a handle on one process, which runs
`worker.py`.

Invariants: every check gets exactly one outcome, and no outcome reaches another check
(`processes/child.py`). Only the check that hangs or kills its process fails; the checks queued
behind it go to the next process. Everything that a worker has started ends with it.
"""

from __future__ import annotations

import json
import math
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..processes.child import Child, ChildEnded, ChildError, ChildSilent, Message
from .worker import Check, Outcome

START_TIMEOUT_S = 120.0  # a process may import a large library before its first check
CHECKS_PER_REQUEST = 128
MAX_REPLY_BYTES = 1 << 24
_BAD_REPLY = "sent a malformed reply"


@dataclass(frozen=True)
class RewardInfo:
    """What a process reports about a reward it has loaded."""

    name: str
    takes_groups: bool


@dataclass(frozen=True)
class _Job:
    """One check in flight. `index` is the caller's index of it."""

    index: int
    check: Check


@dataclass
class _Worker:
    """One process.

    Attributes:
        child: the process.
        deadline: of the first pending job, or of the start; a time.monotonic() value in seconds.
        ready: whether it has loaded the rewards.
        pending: jobs, in the order of their answers.
        blames_answer: whether a failure of the first pending job counts against the answer.
    """

    child: Child
    deadline: float
    ready: bool = False
    pending: deque[_Job] = field(default_factory=deque)
    blames_answer: bool = False

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    def send(self, jobs: Sequence[_Job], timeout_s: float) -> None:
        """Send jobs to an idle process."""
        self.pending.extend(jobs)
        self.deadline = time.monotonic() + timeout_s
        checks = [job.check for job in jobs]
        with suppress(ChildSilent):  # its deadline has passed, too
            self.child.send(
                pickle.dumps(checks, protocol=pickle.HIGHEST_PROTOCOL), timeout_s, len(jobs)
            )


class WorkerPool:
    """Pool of processes that have loaded rewards.

    Args:
        specs: names of the rewards.
        workers: number of processes.
        timeout_s: maximum seconds per check.
    """

    def __init__(self, specs: Sequence[str], *, workers: int, timeout_s: float) -> None:
        self._specs = list(specs)
        self._size = workers
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._rewards: list[RewardInfo] = []

    def start(self) -> None:
        """Start missing processes without waiting: they load their rewards in the background."""
        self._workers += [self._spawn() for _ in range(self._size - len(self._workers))]

    def rewards(self) -> list[RewardInfo]:
        """The rewards, in the order of `specs`. Starts the pool and waits for the first process.

        Raises:
            UserError: if the rewards cannot be loaded.
        """
        self.start()
        while not self._rewards:
            self._attend(lambda index, outcome: None)
        return self._rewards

    def run(self, checks: Sequence[Check], on_outcome: Callable[[int, Outcome], None]) -> None:
        """Call `on_outcome(index, outcome)` once per check, in order of completion.

        An exception of `on_outcome` ends the run and the processes.
        """
        self.start()
        queue = deque(_Job(index, check) for index, check in enumerate(checks))
        share = max(1, min(CHECKS_PER_REQUEST, len(queue) // (2 * self._size)))
        try:
            while queue or any(worker.pending for worker in self._workers):
                for worker in self._workers:
                    if queue and worker.idle:
                        worker.send(
                            [queue.popleft() for _ in range(min(share, len(queue)))],
                            self._timeout_s,
                        )
                queue.extendleft(reversed(self._attend(on_outcome)))
        except BaseException:
            self.close(grace_s=0.0)  # half-read replies would answer the next caller's checks
            raise

    def close(self, grace_s: float = 1.0) -> None:
        """End every process. The pool starts again when it is used again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.child.close(0.0 if worker.pending else grace_s)

    def _attend(self, on_outcome: Callable[[int, Outcome], None]) -> list[_Job]:
        """Wait for replies or a deadline, and handle them.

        Returns:
            Checks whose process died before it ran them.
        """
        orphans: list[_Job] = []
        for worker in self._wait():
            try:
                for message in worker.child.arrived():
                    self._take(worker, message, on_outcome)
            except ChildError as error:
                orphans += self._replace(worker, f"process {error}", on_outcome)
        now = time.monotonic()
        for worker in list(self._workers):
            if now > worker.deadline and not worker.idle:
                orphans += self._replace(worker, f"timeout after {self._timeout_s:g} s", on_outcome)
        return orphans

    def _wait(self) -> list[_Worker]:
        """Workers with something to read. Empty if the earliest deadline has passed."""
        busy = [worker for worker in self._workers if not worker.idle]
        patience = min(worker.deadline for worker in busy) - time.monotonic() if busy else 0.0
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.child.replies, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, patience) + 1)}
        return [worker for worker in self._workers if worker.child.replies in readable]

    def _take(
        self, worker: _Worker, message: Message, on_outcome: Callable[[int, Outcome], None]
    ) -> None:
        """Handle one message.

        Raises:
            ChildEnded: if it has the wrong form.
            UserError: if the rewards could not be loaded.
        """
        if not worker.ready:
            self._rewards = _loaded(_parsed(message.body))
            worker.ready = True
        elif not message.is_answer:
            worker.blames_answer = True
        else:
            outcome = _outcome(_parsed(message.body), worker.pending[0].check)
            job = worker.pending.popleft()
            worker.blames_answer = False
            worker.deadline = time.monotonic() + self._timeout_s
            on_outcome(job.index, outcome)

    def _replace(
        self, worker: _Worker, reason: str, on_outcome: Callable[[int, Outcome], None]
    ) -> list[_Job]:
        """End `worker` and start another. Its running check fails for `reason`.

        Returns:
            The checks that it had not begun.
        """
        self._workers.remove(worker)
        worker.child.close(grace_s=0.0)
        if not worker.ready:
            raise UserError(
                f"environment.rewards: a process that checks answers did not start ({reason})."
                f" Rewards: {', '.join(self._specs)}"
            )
        self._workers.append(self._spawn())
        if worker.pending:
            job = worker.pending.popleft()
            seconds = self._timeout_s if reason.startswith("timeout") else 0.0
            if worker.blames_answer:
                on_outcome(job.index, Outcome([0.0] * len(job.check.completions), None, seconds))
            else:
                on_outcome(job.index, Outcome([], reason, seconds))
        return list(worker.pending)

    def _spawn(self) -> _Worker:
        child = Child(
            "sixfold.environment.worker",
            environment={"OMP_NUM_THREADS": "1"},
            reply_limit=MAX_REPLY_BYTES,
        )
        child.send(json.dumps(self._specs).encode())
        return _Worker(child, deadline=time.monotonic() + START_TIMEOUT_S)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChildEnded(_BAD_REPLY) from error
    if not isinstance(reply, dict):
        raise ChildEnded(_BAD_REPLY)
    return reply


def _loaded(reply: dict[str, Any]) -> list[RewardInfo]:
    """The rewards that a process has loaded, from its first answer."""
    match reply:
        case {"fatal": str(message)}:
            raise UserError(message)
        case {"rewards": list(rewards)}:
            return [RewardInfo(name, takes_groups) for name, takes_groups in rewards]
    raise ChildEnded(_BAD_REPLY)


def _outcome(reply: dict[str, Any], check: Check) -> Outcome:
    """Outcome in a reply.

    Raises:
        ChildEnded: if the reply has neither one value per completion nor an error.
    """
    match reply:
        case {"values": [], "error": str(error), "seconds": float(seconds)}:
            return Outcome([], error, seconds)
        case {"values": list(values), "error": None, "seconds": float(seconds)} if len(
            values
        ) == len(check.completions):
            if all(
                value is None or (isinstance(value, float) and math.isfinite(value))
                for value in values
            ):
                return Outcome(values, None, seconds)
    raise ChildEnded(_BAD_REPLY)
