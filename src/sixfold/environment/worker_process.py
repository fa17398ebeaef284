"""Handle on one process that checks answers: what it does now, and what its replies mean."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..errors import UserError
from ..processes.child import Child, ChildEnded, Message
from .worker import Check, Outcome

START_TIMEOUT_S = 120.0  # a process may import a large library before its first check
MAX_REPLY_BYTES = 1 << 24
_BAD_REPLY = "sent a malformed reply"
_TICKETS = count(1)


@dataclass(frozen=True)
class RewardInfo:
    """Description of a reward that a process has loaded."""

    name: str
    takes_groups: bool


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
    """One process.

    Args:
        specs: names of the rewards that it loads.

    Attributes:
        child: the process.
        deadline: of the first pending job, or of the start; a time.monotonic() value in seconds.
        ready: whether it has loaded the rewards.
        pending: jobs, in the order of their answers.
        blames_answer: whether a failure of the first pending job counts against the answer.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        self.child = Child(
            "sixfold.environment.worker",
            environment={"OMP_NUM_THREADS": "1"},
            reply_limit=MAX_REPLY_BYTES,
        )
        self.child.post(json.dumps(list(specs)).encode())
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.ready = False
        self.pending: deque[Job] = deque()
        self.blames_answer = False

    @property
    def idle(self) -> bool:
        """True if it can take jobs."""
        return self.ready and not self.pending

    def send(self, jobs: Sequence[Job], timeout_s: float) -> None:
        """Begin to send jobs to an idle process. Flush the child until all is sent."""
        self.pending.extend(jobs)
        self.deadline = time.monotonic() + timeout_s
        checks = [(job.ticket, job.check) for job in jobs]
        self.child.post(pickle.dumps(checks, protocol=pickle.HIGHEST_PROTOCOL), len(jobs))

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
                self.ready = True
                return [RewardInfo(name, takes_groups) for name, takes_groups in rewards]
        raise ChildEnded(_BAD_REPLY)

    def answered(self, message: Message) -> tuple[Job, Outcome] | None:
        """The job that a message answers, which is no longer pending. None for a note.

        Raises:
            ChildEnded: if the message has the wrong form.
        """
        if not message.is_answer:
            self.blames_answer = True
            return None
        outcome = _outcome(_parsed(message.body), self.pending[0])
        self.blames_answer = False
        return self.pending.popleft(), outcome

    def watch_writing(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the rest of the request when the process reads."""

        def write() -> None:
            if self.child.flush():
                loop.remove_writer(self.child.requests)

        loop.add_writer(self.child.requests, write)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remove the descriptors of the process from an event loop."""
        if not loop.is_closed():
            loop.remove_reader(self.child.replies)
            loop.remove_writer(self.child.requests)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChildEnded(_BAD_REPLY) from error
    if not isinstance(reply, dict):
        raise ChildEnded(_BAD_REPLY)
    return reply


def _outcome(reply: dict[str, Any], job: Job) -> Outcome:
    """Outcome in a reply.

    Raises:
        ChildEnded: if the reply is about another check, or has neither one value per completion nor
            an error.
    """
    match reply:
        case {"check": job.ticket, "values": [], "error": str(error), "seconds": float(seconds)}:
            return Outcome([], error, seconds)
        case {
            "check": job.ticket,
            "values": list(values),
            "error": None,
            "seconds": float(seconds),
        } if len(values) == len(job.check.completions):
            if all(
                value is None or (isinstance(value, float) and math.isfinite(value))
                for value in values
            ):
                return Outcome(values, None, seconds)
    raise ChildEnded(_BAD_REPLY)
