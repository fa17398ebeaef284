"""One call of one reward, and its outcome."""

from __future__ import annotations

import asyncio
import os
import time
from typing import NamedTuple

from ..errors import one_line
from ..types import Task
from .rewards import RewardFunction
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


async def run_async_check(function: RewardFunction, check: Check, timeout_s: float) -> Outcome:
    """Call an async reward. An exception or a time-out becomes the outcome's error.

    Args:
        function: the reward.
        check: its arguments.
        timeout_s: maximum seconds. After them the reward is cancelled. It is not waited for,
            because it may ignore that.
    """
    start = time.perf_counter()
    task = asyncio.ensure_future(_scored(function, check))
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if task.done():
            values, error = task.result()
        else:
            values, error = [], f"timeout after {timeout_s:g} s"
    finally:
        task.cancel()
    return Outcome(values, error, time.perf_counter() - start)


async def _scored(function: RewardFunction, check: Check) -> tuple[list[float | None], str | None]:
    """Values and error of an async reward. Even sys.exit in it must not end the event loop."""
    process = os.getpid()
    try:
        return await function.scores_async(check.completions, check.task, check.sampled), None
    except BaseException as raised:  # noqa: BLE001  boundary: a failed check is data
        return [], one_line(raised)
    finally:
        if os.getpid() != process:
            os._exit(1)  # as in run_check; the event loop would read its parent's wake-ups
