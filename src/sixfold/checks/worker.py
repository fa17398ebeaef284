"""Runs checks. `serve` is the program of a process that checks answers (`processes/program.py`).

The first request is JSON: {"rewards": names, "timeout_s": seconds per async check, "isolation":
weakest level of sandboxes}. Its answer is {"rewards": [[name, form, runs_async, version], ...]}, or
{"fatal": message} if they cannot be loaded. Every later request is a pickled list of (ticket,
check). Each check is answered as soon as it is done: {"check": ticket, "values": [...], "error":
null or text, "seconds": s, "cause": text}. A value is a number, null, or a grade as an object.

Plain functions run in the main thread, one after another. So the parent always knows which check is
running. Async functions run concurrently, in one event loop (`rewards.reward_loop`); (ticket, None)
cancels one. The parent sends a process checks of only one of the two kinds.

Before the answer to a check there may be a note. From a process of plain functions it means that
from then on any failure, including a time-out, counts against the text that is checked
(`limits.blame_answer`). From a process of async functions it means that the event loop runs.

A reward may fork. A child that returns or raises out of the reward ends there: it must not answer,
and must not read requests. Answers are JSON and not pickles, so the parent never executes what a
reward writes. Standard output belongs to the reward functions.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from multiprocessing import resource_tracker
from typing import cast

from ..environment.grade import Grade
from ..environment.named import load_object
from ..environment.registry import reward_row
from ..environment.rewards import RewardFunction, load_reward, reward_loop
from ..errors import RunFailed, UserError, is_fault, one_line
from ..processes.program import (
    Requests,
    adopt_orphans,
    descendants,
    end_descendants,
    has_children,
    helpers,
)
from ..user_code import Called, calling
from .check import Check, Outcome, RewardInfo
from .limits import allow, limit_memory, on_blame, set_time_limit

HEARTBEAT_S = 0.25


def serve(requests: Requests) -> None:
    """Answer checks until the parent closes its end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: other processes write to the same file, and a kill must not lose any.
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True, write_through=False)
    adopt_orphans()
    process = os.getpid()
    start = json.loads(next(requests))
    specs = start["rewards"]
    set_time_limit(start["timeout_s"])
    allow(start["isolation"])
    try:
        functions = [load_reward(spec) for spec in specs]
        # Now, while the model loads: on a busy machine it takes longer than one check may.
        for prepare in dict.fromkeys(f.row.prepare for f in functions if f.row.prepare):
            load_object(prepare)()
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
        return
    finally:
        if os.getpid() != process:
            os._exit(1)
    # A user's reward may map more memory than it uses, for example with a GPU.
    if all(reward_row(spec).bounded for spec in specs):
        limit_memory()
    # Processes started while loading the rewards may outlive a check.
    loaded = frozenset(descendants())
    on_blame(requests.note)
    requests.answer(json.dumps({"rewards": list(map(RewardInfo.of, functions))}).encode())

    def end_processes() -> None:
        if has_children():
            end_descendants(loaded | helpers | _pooled())

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


def _pooled() -> set[int]:
    """Processes of the pools that rewards keep between checks, and the tracker that serves them.

    A reward may start its pool in its first check. If its processes ended with the check, every
    later one would find a broken pool, and a reward that catches the error would pay 0.
    """
    executors = [t for t in threading.enumerate() if type(t).__name__ == "_ExecutorManagerThread"]
    pids = {pid for thread in executors for pid in list(vars(thread)["processes"])}
    children = multiprocessing.active_children()
    pids |= {child.pid for child in children if child.pid and "PoolWorker" in child.name}
    tracker = vars(resource_tracker)["_resource_tracker"]
    return pids | {tracker._pid} if pids and tracker._pid else pids


class AsyncChecks:
    """Runs async checks and answers each as soon as it is done. Every check gets one answer.

    Args:
        timeout_s: maximum seconds per check.
        answer: called with a ticket and the outcome, in the thread of the event loop.
        unused: called in that thread when no check is running, before the last answer.
        heartbeat: called in that thread at short intervals while checks run that time themselves:
            they may wait longer than `timeout_s`.
    """

    def __init__(
        self,
        timeout_s: float,
        answer: Callable[[int, Outcome], None],
        unused: Callable[[], None],
        heartbeat: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._answer = answer
        self._unused = unused
        self._heartbeat = heartbeat
        self._waiting: set[int] = set()  # tickets of checks that time themselves
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, ticket: int, function: RewardFunction, check: Check) -> None:
        """Start a check. Any thread may call this."""
        reward_loop().call_soon_threadsafe(self._start, ticket, function, check)

    def cancel(self, ticket: int) -> None:
        """Cancel a check if it is still running. It is answered with an error."""
        reward_loop().call_soon_threadsafe(self._cancel, ticket)

    def _start(self, ticket: int, function: RewardFunction, check: Check) -> None:
        self._tasks[ticket] = asyncio.ensure_future(self._run(ticket, function, check))
        if function.row.times_itself:
            self._waiting.add(ticket)
            if self._timer is None:
                self._beat()

    def _beat(self) -> None:
        self._timer = None
        if self._waiting:
            with suppress(BrokenPipeError):  # the parent is gone
                self._heartbeat()
            self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _cancel(self, ticket: int) -> None:
        if ticket in self._tasks:
            self._tasks[ticket].cancel()

    async def _run(self, ticket: int, function: RewardFunction, check: Check) -> None:
        try:
            outcome = await run_async_check(function, check, self._timeout_s)
        except asyncio.CancelledError:
            outcome = Outcome([], "cancelled", 0.0, "raised")
        del self._tasks[ticket]
        self._waiting.discard(ticket)
        if not self._tasks:
            self._unused()
        with suppress(BrokenPipeError):  # the parent is gone
            self._answer(ticket, outcome)


def run_check(function: RewardFunction, check: Check) -> Outcome:
    """Call the reward. An exception becomes the outcome's error."""
    start = time.perf_counter()
    values: list[float | Grade | None] = []
    error: str | None = None
    try:
        with calling():
            values = function.scores(check.completions, check.task, check.sampled, check.others)
    except BaseException as raised:  # boundary: a failed check is data
        if not is_fault(raised):
            raise
        error = one_line(raised)
    return _outcome(values, error, start)


async def run_async_check(function: RewardFunction, check: Check, timeout_s: float) -> Outcome:
    """Call an async reward. An exception or a time-out becomes the outcome's error.

    Args:
        timeout_s: time limit in seconds. Then the reward is cancelled. Its end is not awaited,
            because it may ignore the cancellation. A reward that keeps the limit itself is not
            cancelled.
    """
    longest_s = None if function.row.times_itself else timeout_s
    start = time.perf_counter()
    task = asyncio.ensure_future(_scored(function, check))
    try:
        await asyncio.wait([task], timeout=longest_s)
        if task.done():
            return _outcome(*task.result(), start)
    finally:
        task.cancel()
    return Outcome([], f"timeout after {timeout_s:g} s", time.perf_counter() - start, "timeout")


def _outcome(values: list[float | Grade | None], error: str | None, start: float) -> Outcome:
    return Outcome(values, error, time.perf_counter() - start, "raised" if error else "")


async def _scored(
    function: RewardFunction, check: Check
) -> tuple[list[float | Grade | None], str | None]:
    """Values and error of an async reward. Even sys.exit in it must not end the event loop."""
    given = check.completions, check.task, check.sampled, check.others
    try:
        return await Called(partial(function.scores_async, *given)), None
    except BaseException as raised:  # boundary: a failed check is data
        if function.repeats_itself and isinstance(raised, UserError | RunFailed):
            raise  # the model cannot be used, or may not be used any more: the run stops
        return [], one_line(raised)
