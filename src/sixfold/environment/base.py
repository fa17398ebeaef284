"""The environment role: a protocol for scoring trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Group


class EnvironmentRole(Protocol):
    """Turns trajectories into rewards. It sees text and tasks, never logits."""

    def score(self, groups: Sequence[Group], *, expected: int = 0) -> None:
        """Fill `trajectory.reward` of every trajectory that has none. Others are left unchanged.

        A failed check is a `Reward` whose value is None and whose error is one line. It never
        becomes a number.

        Args:
            groups: trajectories by task.
            expected: total number of trajectories of the step, if `groups` is only a part of them.
        """

    def close(self) -> None:
        """Release processes and files. A second call does nothing."""
