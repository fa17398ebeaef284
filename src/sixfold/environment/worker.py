"""The program of a process that checks answers (`processes/program.py`).

The first request is JSON: {"rewards": names, "timeout_s": seconds per async check, "isolation":
weakest level of sandboxes}. Its answer is {"rewards": [[name, takes_groups, runs_async, version],
...]}, or {"fatal": message} if they cannot be loaded. Every later request is a pickled list of
(ticket, check). Each check is answered as soon as it is done: {"check": ticket, "values": [...],
"error": null or text, "seconds": s, "cause": text}. A value is a number, null, or a grade as an
object.

Plain functions run in the main thread, one after another. So the parent always knows which check is
running. Async functions run concurrently, in the event loop of `values`; (ticket, None) cancels
one. The parent sends a process checks of only one of the two kinds.

Before the answer to a check there may be a note. From a process of plain functions it means that
from then on any failure, including a time-out, counts against the text that is checked
(`limits.blame_answer`). From a process of async functions it means that the event loop runs.

A reward may fork. A child that returns or raises out of the reward ends there: it must not answer,
and must not read requests. Answers are JSON and not pickles, so the parent never executes what a
reward writes. Standard output belongs to the reward functions.
"""

from __future__ import annotations

import json
import os
import pickle
import resource

from ..errors import UserError
from ..processes.program import (
    Requests,
    adopt_orphans,
    descendants,
    end_descendants,
    has_children,
)
from .async_checks import AsyncChecks
from .checks import Outcome, run_check
from .limits import limit_memory, on_blame, set_time_limit
from .maths.algebra import load_cas
from .rewards import BOUNDED, MATHS, load_reward
from .sandbox.cells import launchers
from .sandbox.isolation import detected
from .sandbox.levels import allow


def serve(requests: Requests) -> None:
    """Answer checks until the parent closes its end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adopt_orphans()
    process = os.getpid()
    start = json.loads(next(requests))
    specs = start["rewards"]
    set_time_limit(start["timeout_s"])
    allow(start["isolation"])
    try:
        functions = [load_reward(spec) for spec in specs]
        if any(function.times_itself for function in functions):
            detected()  # now, as below: it starts a sandbox
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
        return
    finally:
        if os.getpid() != process:
            os._exit(1)
    if MATHS.intersection(specs):
        # Now, while the model loads: on a busy machine it takes longer than one check may.
        load_cas()
    # A user's reward may map more memory than it uses, for example with a GPU.
    if set(specs) <= BOUNDED:
        limit_memory()
    # Processes started while loading the rewards may outlive a check.
    helpers = frozenset(descendants())
    on_blame(requests.note)
    rewards = [[f.name, f.takes_groups, f.runs_async, f.version] for f in functions]
    requests.answer(json.dumps({"rewards": rewards}).encode())

    def end_processes() -> None:
        if has_children():
            end_descendants(helpers | launchers())

    def answer(ticket: int, outcome: Outcome) -> None:
        requests.answer(json.dumps({"check": ticket, **outcome.to_record()}).encode())

    running = AsyncChecks(start["timeout_s"], answer, end_processes, requests.note)
    for body in requests:
        for ticket, check in pickle.loads(body):
            if check is None:
                running.cancel(ticket)
            elif functions[check.reward].runs_async:
                running.start(ticket, functions[check.reward], check)
            else:
                outcome = run_check(functions[check.reward], check)
                end_processes()
                answer(ticket, outcome)
