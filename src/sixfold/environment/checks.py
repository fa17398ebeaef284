"""One call of one reward, and its outcome."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Literal, NamedTuple

from ..errors import BudgetSpent, UserError, one_line
from ..types import Task
from .grade import Grade
from .group_form import Standing
from .rewards import RewardFunction
from .sampled import Sampled


class Check(NamedTuple):
    """One call of one reward.

    Attributes:
        reward: index of the reward.
        task: the task.
        completions: a single text, or all completions of a group for a TRL function.
        sampled: values that the function may ask for by parameter name.
        standings: results of the other rewards, for each completion of a group.
    """

    reward: int
    task: Task
    completions: list[str]
    sampled: Sampled
    standings: tuple[Standing, ...] = ()


Cause = Literal["", "raised", "timeout", "died"]
"""Why a check failed: the reward raised or returned no reward, it took too long, or its process
ended. "" if the check did not fail.
"""


class Outcome(NamedTuple):
    """Result of a check.

    Attributes:
        values: one number or grade per completion. None: the reward does not apply. Empty if the
            check failed.
        error: error on one line, or None.
        seconds: duration.
        cause: why the check failed.
        cached: whether the outcome is that of an earlier check.
    """

    values: list[float | Grade | None]
    error: str | None
    seconds: float
    cause: Cause = ""
    cached: bool = False

    @property
    def may_succeed_again(self) -> bool:
        """True if the check or one of its grades failed, and another run may help."""
        return self.cause in ("raised", "died") or any(map(_failed, self.values))

    def completed_by(self, first: Outcome) -> Outcome:
        """This outcome, of a second run, completed with the values of the first run.

        Values of the first run are kept. So only completions whose check failed get a new value.
        """
        if not first.values:
            return self._replace(seconds=first.seconds + self.seconds)
        if not self.values:
            return first._replace(seconds=first.seconds + self.seconds)
        pairs = zip(first.values, self.values, strict=True)
        values = [new if _failed(old) else old for old, new in pairs]
        return Outcome(values, None, first.seconds + self.seconds)

    def to_record(self) -> dict[str, object]:
        """JSON form. `worker_process` reads it."""
        values = [v.to_record() if isinstance(v, Grade) else v for v in self.values]
        return {**self._asdict(), "values": values}


def _failed(value: float | Grade | None) -> bool:
    return isinstance(value, Grade) and value.failed


def run_check(function: RewardFunction, check: Check) -> Outcome:
    """Call the reward. An exception becomes the outcome's error."""
    process, start = os.getpid(), time.perf_counter()
    values: list[float | Grade | None] = []
    error: str | None = None
    try:
        values = function.scores(check.completions, check.task, check.sampled, check.standings)
    except Exception as raised:  # noqa: BLE001  boundary: a failed check is data
        error = one_line(raised)
    finally:
        if os.getpid() != process:
            # A child that the reward forked must not continue as a second copy of this process.
            os._exit(1)
    return _outcome(values, error, start)


async def run_async_check(function: RewardFunction, check: Check, timeout_s: float) -> Outcome:
    """Call an async reward. An exception or a time-out becomes the outcome's error.

    Args:
        function: the reward.
        check: its arguments.
        timeout_s: time limit in seconds. Then the reward is cancelled. Its end is not awaited,
            because it may ignore the cancellation. A reward that keeps the limit itself is not
            cancelled.
    """
    longest_s = None if function.times_itself else timeout_s
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
    """Outcome of a call that began at `start` and has ended."""
    return Outcome(values, error, time.perf_counter() - start, "raised" if error else "")


async def _scored(
    function: RewardFunction, check: Check
) -> tuple[list[float | Grade | None], str | None]:
    """Values and error of an async reward. Even sys.exit in it must not end the event loop."""
    process = os.getpid()
    try:
        values = await function.scores_async(
            check.completions, check.task, check.sampled, check.standings
        )
        return values, None
    except BaseException as raised:  # boundary: a failed check is data
        if function.asks_judge and isinstance(raised, UserError | BudgetSpent):
            raise  # the judge cannot be used, or may not be used any more: the run stops
        return [], one_line(raised)
    finally:
        if os.getpid() != process:
            os._exit(1)  # as in run_check; the event loop would read its parent's wake-ups
