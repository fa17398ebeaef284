"""The program of a process that checks answers (`processes/program.py`).

The first request is the names of the rewards as JSON. Its answer is {"rewards": [[name,
takes_groups], ...]}, or {"fatal": message} if they cannot be loaded. Every later request is a
pickled list of (ticket, check). Each check is answered as soon as it is done: {"check": ticket,
"values": [...], "error": null or text, "seconds": s}. Answers come in the order of the checks, so
the parent always knows which check is running.

Before the answer to a check there may be a note. From then on any failure, including a time-out,
counts against the text that is checked (`limits.blame_answer`).

A reward may fork. A child that returns or raises out of the reward ends there: it must not answer,
and must not read requests. Answers are JSON and not pickles, so the parent never executes what a
reward writes. Standard output belongs to the reward functions.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from typing import NamedTuple

from ..errors import UserError
from ..processes.program import (
    Requests,
    adopt_orphans,
    descendants,
    end_descendants,
    has_children,
)
from ..types import Task
from .limits import limit_memory, on_blame
from .math_algebra import load_cas
from .rewards import RewardFunction, load_reward
from .sampled import Sampled


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


def serve(requests: Requests) -> None:
    """Answer checks until the parent closes its end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adopt_orphans()
    process = os.getpid()
    specs = json.loads(next(requests))
    try:
        functions = [load_reward(spec) for spec in specs]
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
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
    on_blame(requests.note)
    rewards = [[function.name, function.takes_groups] for function in functions]
    requests.answer(json.dumps({"rewards": rewards}).encode())
    for body in requests:
        for ticket, check in pickle.loads(body):
            outcome = run_check(functions[check.reward], check)
            if has_children():
                end_descendants(helpers)
            requests.answer(json.dumps({"check": ticket, **outcome._asdict()}).encode())
