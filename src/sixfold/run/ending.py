"""Reasons why a run ends: a text for the screen and a record for summary.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..recipe.schema import RunConfig

TARGET_AFTER = 10
"""Number of steps before run.target_reward may end a run.

reward/ema averages about ten steps, and its first value is that of a single step.
"""


@dataclass(frozen=True)
class Ending:
    """Reason why a run ended.

    Attributes:
        reason: name of the setting in [run] that ended the run. For programs.
        text: progress and reason, shown after "finished: ".
        step: last step done.
    """

    reason: Literal["steps", "target_reward", "max_minutes"]
    text: str
    step: int

    def record(self) -> dict[str, object]:
        """Record for summary.json."""
        return {"reason": self.reason, "text": self.text, "step": self.step}


def why_ended(limits: RunConfig, step: int, ema: float | None, seconds: float) -> Ending | None:
    """Limit that a run has reached, or None if it continues.

    Args:
        limits: the recipe's [run] section.
        step: steps done.
        ema: moving average of the reward. None before the first step.
        seconds: wall time of the run.
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
    if limits.max_minutes > 0 and seconds >= 60 * limits.max_minutes:
        return Ending(
            "max_minutes",
            f"{step} of {limits.steps} steps, run.max_minutes = {limits.max_minutes:g} reached",
            step,
        )
    return None


def how_to_go_on(ending: Ending) -> str:
    """Tell the user which setting lets an ended run continue."""
    return f"to continue, resume with a larger --run.{ending.reason}"
