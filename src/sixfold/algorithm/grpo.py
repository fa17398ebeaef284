"""GRPO: group-relative policy optimisation (arXiv:2402.03300 eq. 3; DeepSeekMath).

    A_i = (r_i - mean) / (std + 1e-6) over the group, population std
    loss = mean_i mean_t -min(r_it A_i, clip(r_it, 1 - eps, 1 + eps) A_i) + beta k3(pi, ref),   r_it = pi(o_it) / pi_old(o_it)

Patches PPO in one line: the group's mean and std stand in for the critic, which halves the memory. It costs K samples a prompt, gives nothing on a
group whose rewards are all equal, and its per-sequence mean favours short right answers and long wrong ones (Dr. GRPO, arXiv:2503.20783).

Runs alone on the shared task: python -m sixfold.algorithm.grpo
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..batch import Batch, LossOutput
from .advantages import group_zscore
from .base import Settings, advantages_of
from .losses import clipped_surrogate


@dataclass(frozen=True)
class Grpo(Settings):
    """GRPO; clip, beta, KL and aggregation as the settings say."""

    def compute_advantages(self, batch: Batch) -> Batch:
        """A = (r - mean) / std of the group."""
        return self.fill(batch, group_zscore(self.scores(batch), batch.group))

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """The clipped surrogate, and beta * KL."""
        clip_low, clip_high = self.defaults.clip_low, self.defaults.clip_high
        if clip_low is None or clip_high is None:
            raise ValueError("GRPO needs clip_low and clip_high")
        s = clipped_surrogate(logp, batch.old_logp, advantages_of(batch), clip_low, clip_high)
        return self.assemble(batch, logp, s.loss, {"train/clipped_frac": s.outside.float(), "train/clip_active_frac": s.active.float()})


if __name__ == "__main__":
    from sixfold.algorithm.shared_task import main

    main("grpo")
