"""Contract of rollouts: from tasks to K trajectories per task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..types import Group, Task, Trajectory

Enough = Callable[[Task, Sequence[Trajectory]], list[Trajectory] | None]
"""Decides whether a task's group is complete. Called each time one of its trajectories ends.

Args: the task, and its finished trajectories in the order in which they ended.

Returns: the trajectories of the group, or None to continue. The task's other samples are discarded,
and those still running are aborted.
"""


class Rollout(Protocol):
    """Samples completions from the current weights.

    `generate` is deterministic in (weights, tasks, seed).
    """

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """Sample K trajectories per task.

        Args:
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.

        Returns:
            One group per task, in task order. All fields of a trajectory are set except the reward.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last `generate`."""
        ...


class StoppableRollout(Rollout, Protocol):
    """A rollout that can complete a group before all samples of its task have ended.

    Attributes:
        samples: number of samples that it starts per task.
    """

    @property
    def samples(self) -> int: ...

    def generate_until(self, tasks: Sequence[Task], seed: int, enough: Enough) -> list[Group]:
        """As `generate`, with groups chosen by `enough`.

        Args:
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            enough: returns the trajectories of a group, or None. It must not return None once all
                samples of the task have ended.
        """
        ...
