"""Processes that check answers. Each can be killed without harm to the others.

`WorkerPool` distributes checks and reads outcomes. `_Worker` is a handle on one process, which runs
`worker.py`.

Invariants: every check gets exactly one outcome. A reply counts only if it carries the number of
the running check and the pid of the worker. Only the check that hangs or kills its process fails;
the checks queued behind it go to the next process. Processes are started by exec, never by fork:
this is safe beside torch's threads and does not load torch. A worker's supervisor ends everything
that the worker has started.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .worker import LENGTH, Check, Outcome

START_TIMEOUT_S = 120.0  # a process may import a large library before its first check
CHECKS_PER_REQUEST = 128
MAX_REPLY_BYTES = 1 << 24
STOP_TIMEOUT_S = 5.0  # time for a supervisor to end its process tree


@dataclass(frozen=True)
class RewardInfo:
    """What a process reports about a reward it has loaded."""

    name: str
    takes_groups: bool


class _BadReply(Exception):
    """A worker's pipe holds something that is not a reply. The worker counts as dead."""


@dataclass(frozen=True)
class _Job:
    """One check in flight.

    Attributes:
        index: the caller's index of the check.
        number: unique in the pool, so that a late reply cannot answer another check.
        check: the check.
    """

    index: int
    number: int
    check: Check


@dataclass
class _Worker:
    """One process.

    Attributes:
        process: the supervisor.
        requests: descriptor for requests.
        replies: descriptor of replies.
        deadline: of the first pending job, or of the start; a time.monotonic() value in seconds.
        pid: process that runs the checks. 0 until it has loaded the rewards.
        pending: jobs, in the order of their replies.
        unread: bytes of an incomplete reply.
        blames_answer: number of the check whose failure will count against the answer.
    """

    process: subprocess.Popen[bytes]
    requests: int
    replies: int
    deadline: float
    pid: int = 0
    pending: deque[_Job] = field(default_factory=deque)
    unread: bytes = b""
    blames_answer: int = 0

    @property
    def ready(self) -> bool:
        return self.pid > 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    def send(self, jobs: Sequence[_Job], timeout_s: float) -> None:
        """Send jobs. A dead process is noticed when its replies end, not here."""
        data = pickle.dumps(
            [(job.number, job.check) for job in jobs], protocol=pickle.HIGHEST_PROTOCOL
        )
        self.pending.extend(jobs)
        self.deadline = time.monotonic() + timeout_s
        message = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while message:
                message = message[os.write(self.requests, message) :]
        except BrokenPipeError:
            pass

    def read_lines(self) -> list[bytes] | None:
        """Lines that have arrived, or None if the process has ended."""
        data = os.read(self.replies, 1 << 18)
        if not data:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        if len(self.unread) > MAX_REPLY_BYTES:
            raise _BadReply
        return lines

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process: close its input, then end it by force.

        Its supervisor ends everything that the rewards have started.
        """
        os.close(self.requests)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.replies)


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
        self._numbers = itertools.count(1)

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
        queue = deque(_Job(index, next(self._numbers), check) for index, check in enumerate(checks))
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
            worker.stop(0.0 if worker.pending else grace_s)

    def _attend(self, on_outcome: Callable[[int, Outcome], None]) -> list[_Job]:
        """Wait for replies or a deadline, and handle them.

        Returns:
            Checks whose process died before it ran them.
        """
        orphans: list[_Job] = []
        for worker in self._wait():
            try:
                lines = worker.read_lines()
                for line in lines or ():
                    self._take(worker, line, on_outcome)
            except _BadReply:
                orphans += self._replace(
                    worker, "its process wrote a line that is no reply", on_outcome
                )
                continue
            if lines is None:
                orphans += self._replace(worker, self._death(worker), on_outcome)
        now = time.monotonic()
        for worker in list(self._workers):
            if now > worker.deadline and not worker.idle:
                orphans += self._replace(worker, f"timeout after {self._timeout_s:g} s", on_outcome)
        return orphans

    def _wait(self) -> list[_Worker]:
        """Workers with something to read. Empty if the earliest deadline has passed."""
        busy = [worker for worker in self._workers if not worker.idle]
        patience = min(worker.deadline for worker in busy) - time.monotonic() if busy else 0.0
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select(max(0.0, patience) + 0.001)]

    def _take(
        self, worker: _Worker, line: bytes, on_outcome: Callable[[int, Outcome], None]
    ) -> None:
        """Handle one line.

        Raises:
            _BadReply: if it is not a reply to the running check.
            UserError: if the rewards could not be loaded.
        """
        reply = _parsed(line)
        if not worker.ready:
            worker.pid, self._rewards = _loaded(reply)
        elif reply.get("pid") == worker.pid:
            # A reply with another pid comes from a child of a check and is ignored.
            if not worker.pending or reply.get("check") != worker.pending[0].number:
                raise _BadReply
            job = worker.pending[0]
            if reply.get("blame") == "answer":
                worker.blames_answer = job.number
                return
            outcome = _outcome(reply, job.check)
            worker.pending.popleft()
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
        worker.stop()
        if not worker.ready:
            raise UserError(
                f"a process that checks answers did not start ({reason}); rewards:"
                f" {', '.join(self._specs)}"
            )
        self._workers.append(self._spawn())
        if worker.pending:
            job = worker.pending.popleft()
            seconds = self._timeout_s if reason.startswith("timeout") else 0.0
            if worker.blames_answer == job.number:
                on_outcome(job.index, Outcome([0.0] * len(job.check.completions), None, seconds))
            else:
                on_outcome(job.index, Outcome([], reason, seconds))
        return list(worker.pending)

    def _death(self, worker: _Worker) -> str:
        try:
            code = worker.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "process closed its pipe"
        return (
            f"process ended by {signal.Signals(-code).name}"
            if code < 0
            else f"process ended with code {code}"
        )

    def _spawn(self) -> _Worker:
        requests_read, requests = os.pipe()
        replies, replies_write = os.pipe()
        # -P: a file in the working directory must not shadow a module.
        module = ["-P", "-m", "sixfold.environment.worker"]
        arguments = [str(requests_read), str(replies_write), *self._specs]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        try:
            process = subprocess.Popen(
                [sys.executable, *module, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(requests_read, replies_write),
                process_group=0,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(requests_read)
            os.close(replies_write)
        return _Worker(process, requests, replies, deadline=time.monotonic() + START_TIMEOUT_S)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadReply from error
    if not isinstance(reply, dict):
        raise _BadReply
    return reply


def _loaded(reply: dict[str, Any]) -> tuple[int, list[RewardInfo]]:
    """Pid of the worker and its rewards, from its first line."""
    match reply:
        case {"fatal": str(message)}:
            raise UserError(message)
        case {"pid": int(pid), "rewards": list(rewards)}:
            return pid, [RewardInfo(name, takes_groups) for name, takes_groups in rewards]
    raise _BadReply


def _outcome(reply: dict[str, Any], check: Check) -> Outcome:
    """Outcome in a reply.

    Raises:
        _BadReply: if the reply has neither one value per completion nor an error.
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
    raise _BadReply
