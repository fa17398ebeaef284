"""Reward metrics of a step, from its scored groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from ..types import Group

SOLVED = 0.5
"""A reward from which a task counts as solved, as in the pre-flight."""


def reward_metrics(groups: Sequence[Group]) -> dict[str, float | list[float]]:
    """reward/mean, reward/std, reward/error_frac, reward/part/NAME time/check_p99_s and rollout/solved_length_p98; the mean
    is absent when every check failed, the length when nothing was solved."""
    rewards = [t.reward for g in groups for t in g.trajectories if t.reward is not None]
    values = [r.value for r in rewards if r.value is not None]
    metrics: dict[str, float | list[float]] = {"reward/error_frac": 1 - len(values) / max(1, len(rewards))}
    if values:
        metrics |= {"reward/mean": fmean(values), "reward/std": pstdev(values)}
    if rewards:
        slowest = sorted(r.seconds for r in rewards)
        metrics["time/check_p99_s"] = slowest[min(len(slowest) - 1, int(0.99 * len(slowest)))]
    known = [(t.completion_length, t.reward.value) for g in groups for t in g.trajectories if t.reward and t.reward.value is not None]
    solved = sorted(length for length, value in known if value >= SOLVED)
    if solved:
        metrics["rollout/solved_length_p98"] = float(solved[math.ceil(0.98 * len(solved)) - 1])
    for name in sorted({name for r in rewards for name in r.parts}):
        metrics[f"reward/part/{name}"] = fmean(r.parts[name] for r in rewards if name in r.parts)
    return metrics
