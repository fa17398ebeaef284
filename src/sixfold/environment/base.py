"""The environment role: what the controller asks of whatever says how good a trajectory is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Group


class EnvironmentRole(Protocol):
    """Trajectory -> reward. Sees text and tasks, never a logit."""

    def score(self, groups: Sequence[Group], *, expected: int = 0) -> None:
        """Fill `trajectory.reward` of every trajectory of `groups` that has none; one that has been scored is left as it is.

        expected: trajectories that the step will come to, where these are a part of them.

        A check that fails is a `Reward` whose value is None and whose error is one line; it never becomes a number.
        """

    def close(self) -> None:
        """Give back processes and files. A second call does nothing."""
