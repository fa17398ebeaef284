"""Definition of a solved completion, used by pre-flight, metrics and report.

A completion is solved if its score reaches full marks, `eval.solved_at`. Its score is one of:

- the value of one reward function, before its weight (the default, or `eval.metric = NAME`);
- the weighted sum that is trained on (`eval.metric = "reward"`). Full marks are then
  `eval.solved_at` times the sum of the positive weights.

The default is the verifier: a built-in one if there is one, otherwise the reward with the largest
weight, otherwise the first. Rewards for the form of an answer (`NOT_VERIFIERS`) come last. A TRL
function may say that it does not apply to a task; the next reward in that order then decides.
Partial credit is not solved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import UserError, nearest
from .rewards import BUILT_IN, NOT_VERIFIERS

REWARD = "reward"
"""Name of the metric that is the weighted sum of all rewards."""

TOLERANCE = 1e-6
"""Relative tolerance below full marks: a floating-point sum of 0.7, 0.2 and 0.1 is not exactly 1.
"""


@dataclass(frozen=True)
class SolvedRule:
    """Choice of the score of a completion, and the lowest score that counts as solved.

    Args:
        parts: names of the rewards that may decide, best first. Empty: the weighted sum decides.
        full: the score that counts as solved.
    """

    parts: tuple[str, ...]
    full: float

    def score(self, value: float, parts: Mapping[str, float]) -> float | None:
        """Score of a checked completion. None if no deciding reward applies to it.

        Args:
            value: weighted sum of the rewards.
            parts: value of each reward by name, before its weight.
        """
        if not self.parts:
            return value
        return parts.get(self.decider(parts))

    def decider(self, parts: Mapping[str, float]) -> str:
        """Name of the reward that decides. "" if the sum decides, or if no such reward applies."""
        return next((name for name in self.parts if name in parts), "")

    def solves(self, score: float) -> bool:
        """True if `score` reaches full marks."""
        return score >= self.full - TOLERANCE * max(1.0, abs(self.full))

    def above(self, scores: Sequence[float]) -> str:
        """A warning line if scores exceed full marks, otherwise empty.

        In that case partial credit would count as solved.
        """
        most = max(scores, default=self.full)
        if most <= self.full + TOLERANCE * max(1.0, abs(self.full)):
            return ""
        return (
            f"scores reach {most:g}, but eval.solved_at counts them as solved from {self.full:g}."
            f" If {most:g} is full marks, set eval.solved_at"
        )

    @property
    def text(self) -> str:
        """The rule in words, e.g. `math >= 1`."""
        return f"{self.parts[0] if self.parts else REWARD} >= {self.full:g}"


def solved_rule(
    names: Sequence[str],
    weights: Sequence[float],
    metric: str = "",
    solved_at: float = 1.0,
) -> SolvedRule:
    """Rule for rewards with these names and weights.

    Args:
        names: one per reward, all different.
        weights: one per reward.
        metric: `eval.metric`.
        solved_at: `eval.solved_at`.

    Raises:
        UserError: if `metric` names no reward.
    """
    if metric == REWARD and metric not in names:
        return SolvedRule((), solved_at * (sum(w for w in weights if w > 0) or 1.0))
    if metric and metric not in names:
        hint = nearest(metric, [*names, REWARD])
        raise UserError(
            f"eval.metric = '{metric}' is not a reward of this run. Choose one of"
            f" {', '.join([*names, REWARD])}.{hint}"
        )

    def place(i: int) -> tuple[int, float, int]:
        kind = 2 if names[i] in NOT_VERIFIERS else int(names[i] not in BUILT_IN)
        return kind, -weights[i], i

    order = sorted(range(len(names)), key=place)
    return SolvedRule((metric,) if metric else tuple(names[i] for i in order), solved_at)


def spec_name(spec: str) -> str:
    """Name that `load_reward` gives the reward of a spec, without loading it."""
    return spec if spec in BUILT_IN else spec.rpartition(":")[2]


def reward_labels(names: Sequence[str], specs: Sequence[str]) -> list[str]:
    """Distinct labels of rewards. Rewards with the same name get their spec, or a number.

    Args:
        names: name of each reward function.
        specs: `environment.rewards`; empty strings for functions given from Python.
    """
    return [
        name if names.count(name) == 1 else specs[i] or f"{name} {i}"
        for i, name in enumerate(names)
    ]
