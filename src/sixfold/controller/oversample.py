"""Dynamic K: oversample each task and keep the first K samples whose rewards differ.

A rollout lasts as long as its longest completion. With dynamic K, a group is complete when K of its
samples have finished and their rewards are not all equal. The remaining samples are aborted and do
not contribute to the loss. Samples count in the order of their sampled lengths. This is the order
in which they finish if the engine runs all of them at once. So the choice does not depend on
timing.

This favours short completions. A policy that thinks longer about hard tasks is penalised. Use it
only if long completions are noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Group, Task, Trajectory
from .dynamic_sampling import mixed


class DynamicK:
    """Policy that keeps K trajectories per task from a larger number of samples.

    The rewards of a group differ, unless all samples of the task have equal rewards.

    Args:
        keep: trajectories per task (K). At least 2: one sample cannot differ from itself.
        started: samples that the rollout starts per task.

    Raises:
        ValueError: if `keep` is less than 2, or if no more than `keep` samples are started.
    """

    def __init__(self, keep: int, started: int) -> None:
        if not 2 <= keep < started:
            raise ValueError(
                f"keep = {keep} must be at least 2 and less than the {started} samples"
                " started per task"
            )
        self.keep = keep
        self._started = started

    def __call__(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        """The K trajectories to keep, in sample order, see `rollout.base.Choose`."""
        kept = _first(self.keep, task, ended)
        if not mixed(Group(task, kept)) and len(ended) < self._started:
            return None
        return sorted(kept, key=lambda t: t.sample)


def _first(count: int, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory]:
    """The first `count` trajectories.

    If their rewards are all equal, the first two trajectories that differ and the first of the
    others. If none differ, those whose check or episode has failed come last.
    """
    first = list(ended[:count])
    pairs = ([a, b] for i, b in enumerate(ended) for a in ended[:i])
    pair = (
        None
        if mixed(Group(task, first))
        else next((p for p in pairs if mixed(Group(task, p))), None)
    )
    if pair is None and not mixed(Group(task, first)):
        return sorted(ended, key=lambda t: t.total_reward is None)[:count]
    return (
        first
        if pair is None
        else [*pair, *(t for t in ended if t is not pair[0] and t is not pair[1])][:count]
    )
