"""Reward metrics of a step, from its scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from ..types import Group


def reward_metrics(groups: Sequence[Group]) -> dict[str, float | list[float]]:
    """reward/mean, reward/std, reward/error_frac, reward/part/NAME and time/check_p99_s; the mean is absent when every check failed."""
    rewards = [t.reward for g in groups for t in g.trajectories if t.reward is not None]
    values = [r.value for r in rewards if r.value is not None]
    metrics: dict[str, float | list[float]] = {"reward/error_frac": 1 - len(values) / max(1, len(rewards))}
    if values:
        metrics |= {"reward/mean": fmean(values), "reward/std": pstdev(values)}
    if rewards:
        slowest = sorted(r.seconds for r in rewards)
        metrics["time/check_p99_s"] = slowest[min(len(slowest) - 1, int(0.99 * len(slowest)))]
    for name in sorted({name for r in rewards for name in r.parts}):
        metrics[f"reward/part/{name}"] = fmean(r.parts[name] for r in rewards if name in r.parts)
    return metrics
