"""The environment role: protocols for scoring trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..types import Group, Task, Trajectory


@dataclass(frozen=True)
class Tally:
    """Counts of a scorer for the error budget.

    Attributes:
        trajectories: number of trajectories whose checks have begun.
        failed: number of failed checks and the error of each failure.
    """

    trajectories: int = 0
    failed: tuple[tuple[int, str], ...] = ()


class Scorer(Protocol):
    """Scores the trajectories of one step, each as soon as it has ended.

    All checks of a scorer share one error budget. Different trajectories and groups may be scored
    at the same time. If a call is cancelled, its checks are dropped, and no other call is affected.
    """

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        """Run the rewards that score single completions.

        If no reward scores whole groups, `trajectory.reward` is set on return. A trajectory that
        has a reward is not checked: only its score is filled in. One that was added before is left
        unchanged.

        Raises:
            RewardBudgetExceeded: if too many checks of the step have failed.
        """

    async def finish(self, group: Group) -> None:
        """Run the rewards that score whole groups. Then every trajectory has its reward.

        Trajectories that have a reward are left unchanged, and those that were not added are added.
        Every `add` of a trajectory of the group must have returned before.

        Args:
            group: all trajectories of a task, or those that have ended. Rewards over groups see the
                trajectories without a reward.

        Raises:
            RewardBudgetExceeded: if too many checks of the step have failed.
        """

    def fail(self, trajectory: Trajectory, line: str) -> None:
        """Record that a trajectory cannot be scored, because its episode failed.

        It counts in the error budget as if all of its checks had failed.

        Args:
            trajectory: gets a `Reward` without a value.

        Raises:
            RewardBudgetExceeded: if too many checks of the step have failed.
        """

    def tally(self) -> Tally:
        """Counts of this scorer since the last call, without those of other ranks."""

    def count(self, others: Sequence[Tally]) -> None:
        """Add the counts of other ranks for the same step.

        Raises:
            RewardBudgetExceeded: if too many checks of the step have failed, over all ranks.
        """


class EnvironmentRole(Protocol):
    """Turns trajectories into rewards. It sees text and tasks, never logits."""

    def scorer(self, expected: int) -> Scorer:
        """A scorer for the trajectories of one step.

        Args:
            expected: number of trajectories of the step. The error budget is a share of their
                checks. If more trajectories are added, it is a share of the larger number.
        """

    def close(self) -> None:
        """Release processes and files. A second call does nothing."""
