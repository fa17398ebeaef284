"""Alarm for reward hacking: the training reward rises while held-out accuracy falls.

Every evaluation is compared task by task with the best earlier one. Both movements must be more
than noise: the fall by a paired test, the rise by the spread of the rewards of single steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any, NamedTuple

from ..report.numbers import p_value, percent, points
from .statistics import paired_test

WINDOW = 20
"""Steps whose mean rewards are compared."""
RISE = 2.0
"""Standard errors by which the training reward must have risen."""
LEVEL = 0.05
"""Significance level of a run: see `Divergence.observe`."""


class Comparison(NamedTuple):
    """An evaluation beside the best earlier one.

    Attributes:
        change: difference of the share of tasks solved, now minus best.
        diverged: whether the training reward has risen while this share has fallen.
        warning: one line at the first evaluation that has diverged, otherwise "".
    """

    change: float
    diverged: bool
    warning: str

    def metrics(self) -> dict[str, float]:
        return {"heldout/change": self.change, "heldout/diverged": float(self.diverged)}


@dataclass
class Divergence:
    """Remembers the best evaluation, and the mean rewards of the steps before it.

    Attributes:
        values: share of samples solved, for each task of that evaluation.
        before: mean rewards of the last WINDOW steps up to it.
        evaluations: number of evaluations so far.
        active: whether the last evaluation had diverged.
        since: number of steps after the best evaluation.
        rewards: mean rewards of the last WINDOW steps.
    """

    step: int = 0
    values: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    evaluations: int = 0
    active: bool = False
    since: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "values": list(self.values),
            "before": list(self.before),
            "evaluations": self.evaluations,
            "active": self.active,
            "since": self.since,
            "rewards": list(self.rewards),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.evaluations, self.active, self.since = (
            state[name] for name in ("step", "evaluations", "active", "since")
        )
        self.values, self.before = list(state["values"]), list(state["before"])
        self.rewards = deque(state["rewards"], maxlen=WINDOW)

    def reward(self, mean: float) -> None:
        """Add the mean reward of a step. A value that is not finite is left out."""
        if math.isfinite(mean):
            self.rewards.append(mean)
            self.since += 1

    def observe(self, step: int, values: Sequence[float]) -> Comparison | None:
        """Compare an evaluation with the best earlier one.

        With n earlier evaluations there were n chances to find a better one by luck. So the paired
        test must reach a level of LEVEL / (n (n + 1)).

        Args:
            values: share of samples solved of each task, in the same order every time.

        Returns:
            The comparison. None at the first evaluation, or if the tasks are others.
        """
        earlier, comparable = self.evaluations, len(values) == len(self.values)
        self.evaluations += 1
        if not comparable or not values:
            self._remember(step, values)
            return None
        test = paired_test(list(values), self.values)
        fell = test.difference.mean < 0 and test.p_value < LEVEL / (earlier * (earlier + 1))
        diverged = fell and self._rose()
        line = ""
        if diverged and not self.active:
            line = (
                f"held-out accuracy fell by {points(-test.difference.mean).lstrip('+')} points"
                f" since step {self.step} (from {percent(fmean(self.values))} to"
                f" {percent(fmean(values))}, {p_value(test.p_value)}, paired), while the training"
                f" reward rose from {fmean(self.before):.3g} to {fmean(self._recent()):.3g}: the"
                " policy may be exploiting the checker. Read the samples in the report."
            )
        self.active = diverged
        if fmean(values) >= fmean(self.values):
            self._remember(step, values)
        return Comparison(test.difference.mean, diverged, line)

    def _remember(self, step: int, values: Sequence[float]) -> None:
        self.step, self.values, self.before = step, list(values), list(self.rewards)
        self.since = 0

    def _recent(self) -> list[float]:
        """Mean rewards of the last WINDOW steps after the best evaluation."""
        return list(self.rewards)[-self.since :] if self.since else []

    def _rose(self) -> bool:
        """True if the rewards of the last steps are clearly above those before the best one.

        With a single step on one side, any rise counts.
        """
        recent = self._recent()
        if not self.before or not recent:
            return False
        rise = fmean(recent) - fmean(self.before)
        sides = [side for side in (self.before, recent) if len(side) > 1]
        error = math.sqrt(sum(variance(side) / len(side) for side in sides))
        return rise > 0 and rise > RISE * error
