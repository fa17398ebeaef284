"""A process that checks answers: `python -m sixfold.environment.worker REQUESTS REPLIES SPEC...`.

REQUESTS and REPLIES are file descriptors; each SPEC names a reward. There are two processes. The
first is a supervisor (`processes.supervise`). It ends everything that the second has started as
soon as the second or the trainer is gone. The second loads the rewards and runs the checks.

Protocol. Once, after the rewards are loaded, the worker writes a JSON line: {"pid": p, "rewards":
[[name, takes_groups], ...]}, or {"fatal": message}. Each request is a pickle behind its 4-byte
length: a list of (number, check). Each check is answered by one JSON line as soon as it is done:
{"check": number, "pid": p, "values": [...], "error": null or text, "seconds": s}. Replies come in
the order of the checks, so the parent always knows which check is running.

Before the answer to a check there may be a line {"check": number, "pid": p, "blame": "answer"}.
From then on any failure, including a time-out, counts against the text that is checked
(`limits.blame_answer`).

A reward may fork. A child that returns or raises out of the reward ends there: it must not answer,
and must not read requests. Replies are JSON and not pickles, so the parent never executes what a
reward writes. Standard output belongs to the reward functions.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
import time
from functools import partial
from typing import IO, NamedTuple

from ..errors import UserError
from ..types import Task
from .limits import limit_memory, on_blame
from .math_algebra import load_cas
from .processes import (
    adopt_orphans,
    descendants,
    die_with,
    end_descendants,
    has_children,
    supervise,
)
from .rewards import RewardFunction, load_reward
from .sampled import Sampled

LENGTH = struct.Struct("!I")


class Check(NamedTuple):
    """One call of one reward.

    Attributes:
        reward: index of the reward.
        task: the task.
        completions: a single text, or all completions of a group for a TRL function.
        sampled: values that the function may ask for by parameter name.
    """

    reward: int
    task: Task
    completions: list[str]
    sampled: Sampled


class Outcome(NamedTuple):
    """Result of a check.

    Attributes:
        values: one value per completion. None: the reward does not apply.
        error: error on one line, or None.
        seconds: duration.
    """

    values: list[float | None]
    error: str | None
    seconds: float


def run_check(function: RewardFunction, check: Check) -> Outcome:
    """Call the reward. An exception becomes the outcome's error."""
    process, start = os.getpid(), time.perf_counter()
    try:
        values, error = function.scores(check.completions, check.task, check.sampled), None
    except Exception as raised:  # noqa: BLE001  boundary: a failed check is data
        values, error = [], one_line(raised)
    finally:
        if os.getpid() != process:
            # A child that the reward forked must not continue as a second copy of this process.
            os._exit(1)
    return Outcome(values, error, time.perf_counter() - start)


def one_line(error: BaseException) -> str:
    """`ValueError: message`, on one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def serve(requests: IO[bytes], replies: int, specs: list[str]) -> None:
    """Answer checks until the parent closes its end."""
    process = os.getpid()
    try:
        functions = [load_reward(spec) for spec in specs]
    except UserError as error:
        _reply(replies, {"fatal": str(error)})
        return
    finally:
        if os.getpid() != process:
            os._exit(1)
    if "math" in specs:
        # Now, while the model loads: on a busy machine it takes longer than one check may.
        load_cas()
    # A user's reward may map more memory than it uses, for example with a GPU.
    if set(specs) <= {"arithmetic", "math"}:
        limit_memory()
    # Processes started while loading the rewards may outlive a check.
    helpers = frozenset(descendants())
    _reply(
        replies,
        {
            "pid": process,
            "rewards": [[function.name, function.takes_groups] for function in functions],
        },
    )
    while header := requests.read(LENGTH.size):
        for number, check in pickle.loads(requests.read(*LENGTH.unpack(header))):
            on_blame(partial(_reply, replies, {"check": number, "pid": process, "blame": "answer"}))
            outcome = run_check(functions[check.reward], check)
            if has_children():
                end_descendants(helpers)
            _reply(replies, {"check": number, "pid": process, **outcome._asdict()})


def _reply(descriptor: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Entry point: become the supervisor, and fork a child to do the work."""
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (requests, replies):
        # A program that a reward starts must not keep the pipes open.
        os.set_inheritable(descriptor, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adopt_orphans()
    supervisor = os.getpid()
    child = os.fork()
    if child:
        os.close(replies)
        supervise(child, requests)
    die_with(supervisor)
    adopt_orphans()  # not inherited by the child
    with os.fdopen(requests, "rb") as stream:
        serve(stream, replies, sys.argv[3:])


if __name__ == "__main__":
    main()
