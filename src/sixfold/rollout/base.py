"""The rollout role, in words: give it tasks, get K trajectories of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..types import Group, Task, Trajectory

Enough = Callable[[Task, Sequence[Trajectory]], list[Trajectory] | None]
"""Asked whenever a trajectory of the task has ended, with all that have, in that order: those that make up its group (the others are given up), or
None to go on."""


class Rollout(Protocol):
    """Samples completions from the current weights. `generate` is deterministic in (weights, tasks, seed)."""

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """K trajectories for every task, in task order, streams filled, reward empty."""
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last `generate`."""
        ...


class StoppableRollout(Rollout, Protocol):
    """A rollout whose groups can be whole before all their samples have ended. samples: how many of a task it starts."""

    @property
    def samples(self) -> int: ...

    def generate_until(self, tasks: Sequence[Task], seed: int, enough: Enough) -> list[Group]:
        """As `generate`; a task's group is what `enough` makes of it, and must be all of them once all its samples have ended."""
        ...
