"""The error budget of a step: how many of its checks may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..environment.base import Tally
from ..errors import UserError

_EPISODE = "the episode failed: "
"""Start of the reason if a check cannot run."""


class RewardBudgetExceeded(UserError):
    """More checks failed than the error budget allows: the rewards of this step are meaningless."""


class ErrorBudget:
    """Counts of the checks of one step, over all ranks.

    It raises as soon as the budget is exceeded: a reward that always hangs then costs seconds, not
    hours.

    Args:
        share: share of the checks that may fail.
        rewards: number of checks per trajectory.
        expected: number of trajectories of the step. If more begin, their checks count too.
    """

    def __init__(self, share: float, rewards: int, expected: int) -> None:
        self._share = share
        self._rewards = rewards
        self._expected = expected
        self._begun = 0
        self._failed = 0
        self._failures: list[tuple[int, str]] = []
        self._reported = (0, 0)

    def begin(self) -> None:
        """Count a trajectory whose checks begin."""
        self._begun += 1

    def spend(self, count: int, line: str) -> None:
        """Count failed checks.

        Raises:
            RewardBudgetExceeded: if too many checks have failed.
        """
        self._failed += count
        self._failures.append((count, line))
        checks = self._rewards * max(self._expected, self._begun)
        if self._failed <= self._share * checks:
            return
        counts: Counter[str] = Counter()
        for number, reason in self._failures:
            counts[reason] += number
        shown = " | ".join(f"{number} x {reason}" for reason, number in counts.most_common(3))
        none = all(reason.startswith(_EPISODE) for reason in counts)
        what = "cannot run" if none else "failed"
        raise RewardBudgetExceeded(
            f"{self._failed} of {checks} reward checks {what} (verdict"
            " infrastructure_error), more than environment.error_budget ="
            f" {self._share:g} allows: {shown}. Correct the"
            f" {'environment' if none else 'rewards'}, or raise the budget."
        )

    def spend_all(self, line: str) -> None:
        """Count a trajectory none of whose checks can run, because its episode failed.

        Raises:
            RewardBudgetExceeded: if too many checks have failed.
        """
        self.begin()
        self.spend(self._rewards, _EPISODE + line)

    def tally(self) -> Tally:
        """Counts since the last call, without those of other ranks."""
        begun, failures = self._reported
        self._reported = self._begun, len(self._failures)
        return Tally(self._begun - begun, tuple(self._failures[failures:]))

    def add(self, others: Sequence[Tally]) -> None:
        """Add the counts of other ranks.

        Raises:
            RewardBudgetExceeded: if too many checks have failed, over all ranks.
        """
        self._begun += sum(tally.trajectories for tally in others)
        for tally in others:
            for count, line in tally.failed:
                self.spend(count, line)
        self._reported = self._begun, len(self._failures)
