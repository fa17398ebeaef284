"""Handle on one process that checks answers: what it does now, and what its replies mean."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, cast, get_args

from ..environment.callables import Form
from ..environment.grade import Grade
from ..errors import UserError
from ..processes.child import Child, ChildEnded, Message
from .check import Cause, Check, Outcome, RewardInfo
from .limits import allowed

START_TIMEOUT_S = 120.0  # a process may import a large library before its first check
MAX_REPLY_BYTES = 1 << 24
CANCEL_GRACE_S = 0.5
LATE_S = 1.0
_BAD_REPLY = "sent a malformed reply"
_TICKETS = count(1)


class Job:
    """One check, and the future of its outcome. A cancelled future means a cancelled check."""

    __slots__ = ("check", "outcome", "ticket")

    def __init__(self, check: Check, outcome: asyncio.Future[Outcome]) -> None:
        self.check = check
        self.outcome = outcome
        self.ticket = next(_TICKETS)

    def finish(self, outcome: Outcome) -> None:
        """Deliver the outcome, unless the check is cancelled."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WorkerProcess:
    """One process. It runs checks one after another, or async checks concurrently.

    Args:
        specs: names of the rewards that it loads.
        timeout_s: maximum seconds per check.
        concurrent: True if it runs async checks.
        output: as in `Child`.

    Attributes:
        deadline: time by which the next message must arrive, a time.monotonic() value in seconds.
        ready: whether it has loaded the rewards.
        pending: jobs without an answer, by ticket, in the order in which they were sent.
        blames_answer: whether a failure of the first pending job counts against the answer.
    """

    def __init__(
        self, specs: Sequence[str], timeout_s: float, concurrent: bool, output: int | None = None
    ) -> None:
        self.child = Child(
            "sixfold.checks.worker",
            environment={"OMP_NUM_THREADS": "1"},
            output=output,
            reply_limit=MAX_REPLY_BYTES,
        )
        start = {"rewards": list(specs), "timeout_s": timeout_s, "isolation": allowed()}
        self.child.post(json.dumps(start).encode())
        self.concurrent = concurrent
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.ready = False
        self.pending: dict[int, Job] = {}
        self.blames_answer = False
        self._timeout_s = timeout_s

    @property
    def idle(self) -> bool:
        """True if no message is expected."""
        return self.ready and not self.pending

    def send(self, jobs: Sequence[Job]) -> None:
        """Begin to send jobs. Flush the child until all is sent."""
        if not self.pending:
            self._restart_clock()
        self.pending.update((job.ticket, job) for job in jobs)
        self._post([(job.ticket, job.check) for job in jobs], len(jobs))

    def cancel(self, job: Job) -> None:
        """End a cancelled job soon if it is pending: by a message, or by an earlier deadline."""
        if job.ticket not in self.pending:
            return
        if self.concurrent:
            self._post([(job.ticket, None)], 0)
        elif job is self._first():
            self.deadline = min(self.deadline, time.monotonic() + CANCEL_GRACE_S)

    def load(self, message: Message) -> list[RewardInfo]:
        """The rewards that the process has loaded, from its first message.

        Raises:
            ChildEnded: if the message has the wrong form.
            UserError: if the rewards could not be loaded.
        """
        match _parsed(message.body):
            case {"fatal": str(text)}:
                raise UserError(text)
            case {"rewards": list(rewards)}:
                loaded = [_info(reward) for reward in rewards]
                self.ready = True  # last: a process that has not started is not replaced for ever
                return loaded
        raise ChildEnded(_BAD_REPLY)

    def read_answer(self, message: Message) -> tuple[Job, Outcome] | None:
        """The job that a message answers, which is no longer pending. None for a note.

        Raises:
            ChildEnded: if the message has the wrong form.
        """
        if not message.is_answer:
            if self.concurrent:  # its event loop is not blocked
                self._restart_clock()
            else:
                self.blames_answer = True
            return None
        reply = _parsed(message.body)
        job = self._first()
        if self.concurrent:
            ticket = reply.get("check")
            if not isinstance(ticket, int) or ticket not in self.pending:
                raise ChildEnded(_BAD_REPLY)
            job = self.pending[ticket]
        outcome = _outcome(reply, job)
        del self.pending[job.ticket]
        self.blames_answer = False
        self._restart_clock()
        if self.pending and not self.concurrent and self._first().outcome.done():
            self.cancel(self._first())  # it was cancelled while it waited
        return job, outcome

    def watch_writing(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the rest of the request when the process reads."""

        def write() -> None:
            if self.child.flush():
                loop.remove_writer(self.child.requests)

        loop.add_writer(self.child.requests, write)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.remove_reader(self.child.replies)
            loop.remove_writer(self.child.requests)

    def _first(self) -> Job:
        return next(iter(self.pending.values()))

    def _post(self, checks: list[tuple[int, Check | None]], answers: int) -> None:
        self.child.post(pickle.dumps(checks, protocol=pickle.HIGHEST_PROTOCOL), answers)

    def _restart_clock(self) -> None:
        # Async checks end by themselves at their time limit. A message that is late means that
        # their event loop is blocked.
        late = LATE_S if self.concurrent else 0.0
        self.deadline = time.monotonic() + self._timeout_s + late


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChildEnded(_BAD_REPLY) from error
    if not isinstance(reply, dict):
        raise ChildEnded(_BAD_REPLY)
    return reply


def _info(reward: Any) -> RewardInfo:
    match reward:
        case [str(name), str(form), bool(runs_async), str(version)] if form in get_args(Form):
            return RewardInfo(name, cast(Form, form), runs_async, version)
    raise ChildEnded(_BAD_REPLY)


def _outcome(reply: dict[str, Any], job: Job) -> Outcome:
    """Outcome in a reply."""
    match reply:
        case {
            "check": job.ticket,
            "values": list(values),
            "error": None | str() as error,
            "seconds": float(seconds),
            "cause": str(cause),
        } if cause in get_args(Cause) and bool(cause) == (error is not None):
            expected = 0 if error else len(job.check.completions)
            if len(values) == expected:
                found = [_value(value) for value in values]
                return Outcome(found, error, seconds, cast(Cause, cause))
    raise ChildEnded(_BAD_REPLY)


def _value(value: Any) -> float | Grade | None:
    """One value of a reply."""
    number = value
    if isinstance(value, dict):
        try:
            grade = Grade(**value)
        except (TypeError, ValueError, AttributeError) as error:
            raise ChildEnded(_BAD_REPLY) from error
        if not isinstance(grade.isolation, str):
            raise ChildEnded(_BAD_REPLY)
        value, number = grade, grade.value
    if number is not None and not (isinstance(number, float) and math.isfinite(number)):
        raise ChildEnded(_BAD_REPLY)
    return value  # type: ignore[no-any-return]
