"""Add a scored greedy completion to every group: the baseline of ReMax (arXiv:2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ..environment.base import EnvironmentRole
from ..rollout.base import Rollout
from ..types import Group, Task


class GreedyBaseline:
    """Rollout that fills in `Group.greedy` of the groups of another rollout.

    The greedy completion is scored here. It is not one of the group's trajectories, so it is not
    trained on, and does not count in reward metrics, group statistics, staleness and dumps. It is
    sampled after the group, only for tasks that reach the step.

    Args:
        inner: samples the groups that train.
        greedy: samples one completion per task at temperature 0.
        environment: scores the greedy completions. A step's error budget counts them.
    """

    def __init__(self, inner: Rollout, greedy: Rollout, environment: EnvironmentRole) -> None:
        self._inner = inner
        self._greedy = greedy
        self._environment = environment
        self._stats: dict[str, float] = {}

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """Groups of the inner rollout, each with a scored greedy completion of its task."""
        groups = self._inner.generate(tasks, seed)
        sampled = self._inner.stats()
        alone = self._greedy.generate([group.task for group in groups], seed)
        trajectories = sum(len(group.trajectories) for group in groups)
        self._environment.score(alone, expected=trajectories + len(alone))
        self._stats = sampled | _greedy_stats(alone)
        return [
            replace(group, greedy=found.trajectories[0])
            for group, found in zip(groups, alone, strict=True)
        ]

    def stats(self) -> dict[str, float]:
        """Metrics of the inner rollout, and the cost and reward of the greedy completions."""
        return self._stats


def _greedy_stats(groups: Sequence[Group]) -> dict[str, float]:
    trajectories = [group.trajectories[0] for group in groups]
    known = [value for group in groups for value in group.rewards if value is not None]
    stats = {
        "rollout/greedy_tokens": float(sum(t.sampled_length for t in trajectories)),
        "rollout/greedy_error_frac": 1 - len(known) / len(trajectories),
    }
    return stats | ({"rollout/greedy_reward": fmean(known)} if known else {})
