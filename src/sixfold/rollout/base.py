"""The rollout role, in words: give it tasks, get K trajectories of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Group, Task


class Rollout(Protocol):
    """Samples completions from the current weights. `generate` is deterministic in (weights, tasks, seed)."""

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """K trajectories for every task, in task order, streams filled, reward empty."""
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last `generate`."""
        ...
