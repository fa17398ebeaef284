"""What rollouts of a task say about its pass rate: a bucket, or that more of them are needed.

A task that no rollout solves, or all do, gets further rounds of rollouts until one differs, or
until an exact binomial test at `LEVEL` refuses that its pass rate is inside the bounds. The test
decides at one number of rollouts only, ln(LEVEL) / ln(1 - bound). So stopping early is no second
look, and at most `LEVEL` of the tasks at a bound are decided wrongly: with pass rate p and n
rollouts, (1 - p)^n are held. That the rollouts agree on another answer is a reason that they are
held with, and holds none by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sixfold.data.profile import TaskProfile
from sixfold.evaluation.statistics import binomial_cdf, wilson_interval

Bucket = Literal["held_conflict", "held_hard", "train", "easy"]
LEVEL = 0.05
"""Largest share of the tasks at a bound that may be held, or dropped, wrongly."""


@dataclass(frozen=True)
class Rule:
    """How rollouts decide.

    Args:
        samples: rollouts of a round.
        hard_until: a task is held if its pass rate is below. 0: never.
        easy_from: a task is dropped if its pass rate is above. 1: never.
    """

    samples: int
    hard_until: float
    easy_from: float

    @property
    def rounds(self) -> int:
        """Most rounds of a task: twice those after which equal rollouts are evidence, because
        rollouts with failed checks are none.
        """
        bounds = [bound for bound in (self.hard_until, 1 - self.easy_from) if bound > 0]
        most = max((math.log(LEVEL) / math.log1p(-bound) for bound in bounds), default=1.0)
        return 2 * math.ceil(most / self.samples)

    def lacks(self, found: TaskProfile | None, seed: int) -> bool:
        """True if a task needs the round of this seed."""
        return found is None or not (
            self.decides(found) or any(one.seed == seed for one in found.measured)
        )

    def decides(self, found: TaskProfile) -> bool:
        """True if a task needs no more rollouts. Failed checks alone are tried no more either."""
        if found.rollouts < self.samples:
            return False
        differ = 0 < found.solved < found.samples
        bound = 1 - self.easy_from if found.solved else self.hard_until
        return differ or not found.samples or not bound or self.bucket(found) != "train"

    def bucket(self, found: TaskProfile) -> Bucket:
        """What the rollouts show. Without evidence, a task trains.

        Args:
            found: at least one rollout whose check did not fail.
        """
        if binomial_cdf(found.solved, found.samples, self.hard_until) <= LEVEL:
            conflict = not found.solved and agree(found.rival[1], found.compared)
            return "held_conflict" if conflict else "held_hard"
        failed = found.samples - found.solved
        easy = binomial_cdf(failed, found.samples, 1 - self.easy_from) <= LEVEL
        return "easy" if easy else "train"


def agree(votes: int, samples: int) -> bool:
    """True if more than half of all rollouts would give an answer, by Wilson's interval."""
    return samples > 0 and wilson_interval(votes, samples).low > 0.5
