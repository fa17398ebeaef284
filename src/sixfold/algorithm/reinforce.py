"""REINFORCE with the group mean as baseline (Williams 1992, doi:10.1007/BF00992696; baseline: Kool, van Hoof, Welling 2019).

    A_i = r_i - mean(r of the group)          loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

Patches plain REINFORCE in one line: the baseline. It leaves the gradient's direction and takes most of its variance; because r_i is in the mean, the
gradient is short by the factor (K - 1) / K. No ratio and no clip: rollouts must come from the current weights.

Runs alone on the shared task: python -m sixfold.algorithm.reinforce
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..batch import Batch, LossOutput
from .advantages import group_mean
from .base import Settings, advantages_of
from .losses import policy_gradient


@dataclass(frozen=True)
class Reinforce(Settings):
    """REINFORCE with group mean, sequence-sum aggregation by default."""

    def compute_advantages(self, batch: Batch) -> Batch:
        """A = r - group mean."""
        return self.fill(batch, group_mean(self.scores(batch), batch.group))

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """-A log pi."""
        return self.assemble(batch, logp, policy_gradient(logp, advantages_of(batch)), {})


if __name__ == "__main__":
    from sixfold.algorithm.shared_task import main

    main("reinforce")
