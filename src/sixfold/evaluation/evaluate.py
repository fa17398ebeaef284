"""Held-out evaluation: greedy or sampled completions of tasks that training never saw, scored by the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..environment.base import EnvironmentRole
from ..rollout.base import Rollout
from ..types import Group, Task
from .statistics import Interval, pass_at_k, task_interval


@dataclass(frozen=True)
class Evaluation:
    """Scored groups of held-out tasks. values: per task, the known rewards of its samples (a failed check has none)."""

    groups: list[Group]

    @property
    def values(self) -> list[list[float]]:
        """Rewards by task; a sample whose check failed counts as 0, which can only lower the figure."""
        return [[0.0 if r is None else r for r in group.rewards] for group in self.groups]

    @property
    def interval(self) -> Interval:
        """Mean reward over tasks with its 95 % interval."""
        return task_interval(self.values)

    @property
    def errors(self) -> int:
        """Samples whose check failed."""
        return sum(r is None for group in self.groups for r in group.rewards)

    def pass_at(self, k: int) -> float:
        """Mean over tasks of the unbiased estimate that one of k samples solves it (reward >= 1)."""
        return sum(pass_at_k(len(v), sum(r >= 1 for r in v), k) for v in self.values) / len(self.groups)

    def metrics(self) -> dict[str, float]:
        """The heldout/* metrics."""
        interval = self.interval
        return {"heldout/accuracy": interval.mean, "heldout/low": interval.low, "heldout/high": interval.high}


def evaluate(rollout: Rollout, environment: EnvironmentRole, tasks: Sequence[Task], seed: int) -> Evaluation:
    """Sample, score, and keep what came out. rollout decides samples per task and temperature."""
    groups = rollout.generate(tasks, seed)
    environment.score(groups)
    return Evaluation(groups)
