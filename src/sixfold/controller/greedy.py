"""Add a scored greedy completion to every group: the baseline of ReMax (arXiv:2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ..types import Group


def with_baselines(
    groups: Sequence[Group], greedy: Sequence[Group]
) -> tuple[list[Group], dict[str, float]]:
    """Fill in `Group.greedy`.

    The greedy completion is not one of the group's trajectories, so it is not trained on, and does
    not count in reward metrics, group statistics, staleness and dumps.

    Args:
        groups: groups of the step.
        greedy: scored groups of one greedy completion each, for the same tasks.

    Returns:
        The groups, and the metrics of the cost and reward of the greedy completions.
    """
    filled = [
        replace(group, greedy=alone.trajectories[0])
        for group, alone in zip(groups, greedy, strict=True)
    ]
    return filled, _greedy_stats(greedy)


def _greedy_stats(groups: Sequence[Group]) -> dict[str, float]:
    trajectories = [group.trajectories[0] for group in groups]
    known = [value for group in groups for value in group.rewards if value is not None]
    stats = {
        "rollout/greedy_tokens": float(sum(t.sampled_length for t in trajectories)),
        "rollout/greedy_error_frac": 1 - len(known) / len(trajectories),
    }
    return stats | ({"rollout/greedy_reward": fmean(known)} if known else {})
