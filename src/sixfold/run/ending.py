"""Reasons why a run ends: a text for the screen and a record for summary.json. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

from ..files.folder import RunFolder
from ..recipe.schema import RunConfig

TARGET_AFTER = 10
"""Number of steps before run.target_reward may end a run.

reward/ema averages about ten steps, and its first value is that of a single step.
"""


PACE_STEPS = 4
"""Number of steps of a process after which it predicts the last step that it will reach."""


@dataclass(frozen=True)
class Ending:
    """Reason why a run ended.

    Attributes:
        reason: name of the setting in [run] that ended the run. For programs.
        text: progress and reason, shown after "finished: ".
        step: last step done.
    """

    reason: Literal["steps", "target_reward", "target_accuracy", "max_minutes", "patience"]
    text: str
    step: int

    def record(self) -> dict[str, object]:
        """Record for summary.json."""
        return {"reason": self.reason, "text": self.text, "step": self.step}


def why_ended(
    limits: RunConfig,
    step: int,
    ema: float | None,
    seconds: float,
    *,
    best: float = 0.0,
    waited: int = 0,
) -> Ending | None:
    """Limit that a run has reached, or None if it continues.

    Args:
        limits: the recipe's [run] section.
        step: steps done.
        ema: moving average of the reward. None before the first step.
        seconds: wall time of the run.
        best: highest held-out accuracy. 0 before the first evaluation.
        waited: held-out evaluations since the best one.
    """
    if step >= limits.steps:
        return Ending("steps", f"{step} of {limits.steps} steps", step)
    if (
        limits.target_reward > 0
        and ema is not None
        and step >= TARGET_AFTER
        and ema >= limits.target_reward
    ):
        return Ending(
            "target_reward",
            f"{step} of {limits.steps} steps, run.target_reward = {limits.target_reward:g} reached"
            f" (moving average of the reward {ema:.3f})",
            step,
        )
    if 0 < limits.target_accuracy <= best:
        return Ending(
            "target_accuracy",
            f"{step} of {limits.steps} steps, run.target_accuracy = {limits.target_accuracy:g}"
            f" reached (held-out accuracy {best:.3f})",
            step,
        )
    if 0 < limits.patience <= waited:
        return Ending(
            "patience",
            f"{step} of {limits.steps} steps, run.patience = {limits.patience} reached: the best"
            f" held-out accuracy is {waited} evaluations old",
            step,
        )
    if limits.max_minutes > 0 and seconds >= 60 * limits.max_minutes:
        return Ending(
            "max_minutes",
            f"{step} of {limits.steps} steps, run.max_minutes = {limits.max_minutes:g} reached",
            step,
        )
    return None


def last_ending(run: RunFolder) -> int | None:
    """Step at which an earlier process ended the run, according to summary.json."""
    if not run.summary.is_file():
        return None
    ended = json.loads(run.summary.read_text(encoding="utf-8")).get("ended")
    return int(ended["step"]) if ended else None


def steps_in_time(limits: RunConfig, step: int, seconds: float, per_step: float) -> str:
    """Warning that run.max_minutes will end a run before its last step, or "".

    Args:
        limits: the recipe's [run] section.
        step: steps done.
        seconds: wall time of the run.
        per_step: seconds per step on this machine.
    """
    rest = 60 * limits.max_minutes - seconds
    reached = step + max(0, math.ceil(rest / max(per_step, 1e-9)))
    if not limits.max_minutes or reached >= limits.steps:
        return ""
    needed = math.ceil((seconds + (limits.steps - step) * per_step) / 60)
    return (
        f"run.max_minutes = {limits.max_minutes:g} will end this run after about {reached} of"
        f" {limits.steps} steps: a step takes {per_step:.2g} s here. All steps need about"
        f" {needed} minutes (--run.max_minutes {needed}, or 0 for no limit)"
    )


class Pace:
    """Predicts from the first steps whether run.max_minutes will end a run too early.

    The first step of a process is left out: it compiles and fills caches.

    Args:
        limits: the recipe's [run] section.
    """

    def __init__(self, limits: RunConfig) -> None:
        self._limits = limits
        self._first: tuple[int, float] | None = None

    def observe(self, step: int, seconds: float) -> str:
        """Take the wall time of the run at the end of a step.

        Returns:
            The warning after `PACE_STEPS` steps; "" after others.
        """
        first, began = self._first = self._first or (step, seconds)
        if step != first + PACE_STEPS - 1:
            return ""
        return steps_in_time(self._limits, step, seconds, (seconds - began) / (step - first))


def how_to_go_on(ending: Ending) -> str:
    """Tell the user which setting lets an ended run continue."""
    or_off = "" if ending.reason == "steps" else ", or 0"
    return f"to continue, resume with a larger --run.{ending.reason}{or_off}"
