"""Dynamic K: oversample each task and keep the first K samples whose rewards differ.

A rollout lasts as long as its longest completion. With dynamic K, a group is complete when K of its
samples have finished and their rewards are not all equal. The remaining samples are aborted and do
not contribute to the loss.

This favours short completions, which finish first. A policy that thinks longer about hard tasks is
penalised. Use it only if long completions are noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..environment.base import EnvironmentRole
from ..rollout.base import StoppableRollout
from ..types import Group, Task, Trajectory
from .refill import mixed


class Oversample:
    """Rollout that returns K scored trajectories per task from a larger number of samples.

    Args:
        inner: rollout that starts more than `keep` samples per task.
        environment: scores samples as they finish.
        keep: trajectories per task (K). At least 2: one sample cannot differ from itself.

    Raises:
        ValueError: if `keep` is less than 2, or if `inner` starts no more than `keep` samples.
    """

    def __init__(self, inner: StoppableRollout, environment: EnvironmentRole, keep: int) -> None:
        if not 2 <= keep < inner.samples:
            raise ValueError(
                f"keep = {keep} must be at least 2 and less than the {inner.samples} samples"
                " started per task"
            )
        self._inner = inner
        self._environment = environment
        self._keep = keep
        self._scored: dict[str, Group] = {}
        self._expected = 0

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """Sample and score K trajectories per task, sorted by sample index.

        The rewards of a group differ, unless all samples of the task have equal rewards.
        """
        self._scored, self._expected = {}, len(tasks) * self._inner.samples
        return self._inner.generate_until(tasks, seed, self._enough)

    def stats(self) -> dict[str, float]:
        """Metrics of the inner rollout, including the share of started samples that were kept."""
        return self._inner.stats()

    def _enough(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Choose the K trajectories to keep.

        Args:
            task: task of the samples.
            ended: finished samples, in the order in which they finished.

        Returns:
            The K trajectories, or None to wait for more samples.
        """
        if len(ended) < self._keep:
            return None
        self._scored[task.id] = Group(task, list(ended))
        # Score together with earlier groups, and pass the total number of samples: otherwise one
        # failed check among the first few would exceed the error budget.
        self._environment.score(list(self._scored.values()), expected=self._expected)
        kept = _first(self._keep, task, ended)
        if not mixed(Group(task, kept)) and len(ended) < self._inner.samples:
            return None
        return sorted(kept, key=lambda t: t.sample)


def _first(count: int, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory]:
    """The first `count` trajectories.

    If their rewards are all equal, the first two trajectories that differ and the first of the
    others.
    """
    first = list(ended[:count])
    pairs = ([a, b] for i, b in enumerate(ended) for a in ended[:i])
    pair = (
        None
        if mixed(Group(task, first))
        else next((p for p in pairs if mixed(Group(task, p))), None)
    )
    return (
        first
        if pair is None
        else [*pair, *(t for t in ended if t is not pair[0] and t is not pair[1])][:count]
    )
