"""Reward metrics of a step, from its scored groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from ..types import Group


def reward_metrics(groups: Sequence[Group]) -> dict[str, float | list[float]]:
    """reward/*, time/check_p99_s and rollout/solved_length_p98 of a step.

    reward/mean and reward/std are absent if every check failed. reward/solved_frac is absent if no
    deciding reward applied. rollout/solved_length_p98 is absent if nothing was solved.
    """
    rewards = [t.reward for g in groups for t in g.trajectories if t.reward is not None]
    values = [value for g in groups for value in g.rewards if value is not None]
    metrics: dict[str, float | list[float]] = {
        "reward/error_frac": 1 - len(values) / max(1, len(rewards))
    }
    if values:
        metrics |= {"reward/mean": fmean(values), "reward/std": pstdev(values)}
    if rewards:
        slowest = sorted(r.seconds for r in rewards)
        metrics["time/check_p99_s"] = slowest[min(len(slowest) - 1, int(0.99 * len(slowest)))]
    judged = [r.solved for r in rewards if r.solved is not None]
    if judged:
        metrics["reward/solved_frac"] = sum(judged) / len(judged)
    solved = sorted(
        t.sampled_length for g in groups for t in g.trajectories if t.reward and t.reward.solved
    )
    if solved:
        metrics["rollout/solved_length_p98"] = float(solved[math.ceil(0.98 * len(solved)) - 1])
    for name in sorted({name for r in rewards for name in r.parts}):
        metrics[f"reward/part/{name}"] = fmean(r.parts[name] for r in rewards if name in r.parts)
    return metrics
