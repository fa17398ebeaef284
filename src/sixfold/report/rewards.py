"""Reward metrics of a step, from its scored groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from ..types import Group, Reward


def reward_metrics(groups: Sequence[Group]) -> dict[str, float | list[float]]:
    """reward/*, time/check_* and rollout/solved_length_p98 of a step.

    reward/mean and reward/std are absent if no trajectory has a reward. reward/solved_frac is
    absent if no deciding reward applied. reward/verdict/* are absent if no reward gives verdicts
    and no check failed. rollout/solved_length_p98 is absent if nothing was solved.
    """
    rewards = [t.reward for g in groups for t in g.trajectories if t.reward is not None]
    values = [value for g in groups for value in g.rewards if value is not None]
    failed = sum(r.value is None and not r.not_applicable for r in rewards)
    metrics: dict[str, float | list[float]] = {"reward/error_frac": failed / max(1, len(rewards))}
    if aside := sum(r.not_applicable for r in rewards):
        metrics["reward/not_applicable_frac"] = aside / len(rewards)
    if values:
        metrics |= {"reward/mean": fmean(values), "reward/std": pstdev(values)}
    judged = [r.solved for r in rewards if r.solved is not None]
    if judged:
        metrics["reward/solved_frac"] = sum(judged) / len(judged)
    solved = sorted(
        t.sampled_length for g in groups for t in g.trajectories if t.reward and t.reward.solved
    )
    if solved:
        metrics["rollout/solved_length_p98"] = float(solved[math.ceil(0.98 * len(solved)) - 1])
    for name in sorted({name for r in rewards for name in r.parts}):
        part = [r.parts[name] for r in rewards if name in r.parts]
        metrics[f"reward/part/{name}"] = fmean(part)
        metrics[f"reward/part_std/{name}"] = pstdev(part)
    return metrics | _outcomes(rewards) | _latencies(rewards)


def _outcomes(rewards: Sequence[Reward]) -> dict[str, float | list[float]]:
    """Shares of verdicts, of pay for form alone, and of checks that ran again or were reused."""
    found: dict[str, float | list[float]] = {}
    for verdict, count in sorted(Counter(r.verdict for r in rewards if r.verdict).items()):
        found[f"reward/verdict/{verdict}"] = count / len(rewards)
    paid = [r.paid_for_form for r in rewards if len(r.parts) > 1 and r.paid_for_form is not None]
    if paid:
        found["reward/frac_format_only"] = sum(paid) / len(paid)
    if any(r.reruns for r in rewards):
        found["reward/rerun_frac"] = sum(r.reruns > 0 for r in rewards) / len(rewards)
    if any(r.cached for r in rewards):
        found["reward/cached_frac"] = sum(r.cached > 0 for r in rewards) / len(rewards)
    return found


def _latencies(rewards: Sequence[Reward]) -> dict[str, float | list[float]]:
    """Median and 99th percentile of the duration of checks: of all, and of each of several."""
    found: dict[str, float | list[float]] = {}
    if rewards:
        seconds = [r.seconds for r in rewards]
        found |= {"time/check_p50_s": _rank(seconds, 0.5), "time/check_p99_s": _rank(seconds, 0.99)}
    for name in sorted({name for r in rewards if len(r.latency) > 1 for name in r.latency}):
        of_reward = [r.latency[name] for r in rewards if name in r.latency]
        found[f"time/check_p50_s/{name}"] = _rank(of_reward, 0.5)
        found[f"time/check_p99_s/{name}"] = _rank(of_reward, 0.99)
    return found


def _rank(values: Sequence[float], share: float) -> float:
    """The value above `share` of the values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
