"""Combine the results of all rewards for one trajectory into its `Reward`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..types import Reward
from .grade import Grade, plain_value
from .rewards import MAX_REWARD
from .solved import SolvedRule

NOT_APPLICABLE = "no reward function applies"
"""Error of a trajectory to which no reward function applies. No check failed."""


@dataclass(frozen=True)
class Result:
    """Result of one reward for one trajectory.

    Attributes:
        given: number or grade. None if the reward does not apply, or if its check failed.
        error: how the check failed, on one line, or None.
        seconds: duration of the check.
        reruns: how often the check ran again after a failure.
        cached: whether it is the result of an earlier check.
    """

    given: float | Grade | None
    error: str | None
    seconds: float
    reruns: int = 0
    cached: bool = False

    @property
    def grade(self) -> Grade | None:
        """The grade. None if the reward gave a number or does not apply."""
        if isinstance(self.given, Grade):
            return self.given
        return None if self.error is None else Grade(None, "infrastructure_error")


def combined(results: Sequence[tuple[str, float, Result]], rule: SolvedRule) -> Reward:
    """The reward of a trajectory: the sum of weight x value, with its parts and its verdict.

    Args:
        results: (name, weight, result) of each reward, in the order in which values are added. A
            float sum depends on it.
        rule: when a trajectory counts as solved.
    """
    parts: dict[str, float] = {}
    total = 0.0
    for name, weight, result in results:
        value = plain_value(result.given)
        if result.error is None and value is not None:
            parts[name] = value
            total += weight * value
    decider = rule.decider(parts)
    grade = _speaker(results, decider)
    reward = Reward(
        None,
        parts,
        seconds=sum(result.seconds for _, _, result in results),
        verdict=grade.verdict if grade else None,
        detail=grade.detail if grade else "",
        isolation=grade.isolation if grade else "",
        weights={name: weight for name, weight, _ in results if name in parts},
        decided_by=decider,
        latency={name: result.seconds for name, _, result in results},
        reruns=sum(result.reruns for _, _, result in results),
        cached=sum(result.cached for _, _, result in results),
    )
    errors = [f"{name}: {result.error}" for name, _, result in results if result.error is not None]
    if not errors and not parts:
        return replace(reward, error=NOT_APPLICABLE)
    if not errors and (not math.isfinite(total) or abs(total) > MAX_REWARD):
        errors = [f"the weighted sum {total:g} is beyond {MAX_REWARD:g}"]
    if errors:
        return replace(reward, error="; ".join(errors), verdict="infrastructure_error")
    score = rule.score(total, parts)
    solved = None if score is None else rule.solves(score)
    return replace(reward, value=total, score=score, solved=solved)


def _speaker(results: Sequence[tuple[str, float, Result]], decider: str) -> Grade | None:
    """The grade whose verdict a trajectory gets, see `Reward.verdict`.

    Args:
        results: as in `combined`.
        decider: name of the reward that decides whether the trajectory is solved. "": their sum.
    """
    every = [(name, result.grade) for name, _, result in results]
    given = [grade for _, grade in every if grade is not None]
    failed = [grade for grade in given if grade.failed]
    if decider and not failed:
        return next(grade for name, grade in every if name == decider)
    faulty = [grade for grade in given if grade.verdict != "passed"]
    return next(iter([*failed, *faulty, *given]), None)
