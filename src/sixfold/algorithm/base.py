"""The algorithm role: a protocol with two methods, and metrics of a batch.

An algorithm turns rewards into advantages and weights, and log-probs into a loss. It takes and
returns tensors. It knows no model and no task.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..batch import Batch, LossOutput
from .advantages import degenerate
from .losses import exp_clamped
from .off_policy import chi2, effective_sample_size


class Algorithm(Protocol):
    """Algorithm as the training loop calls it."""

    @property
    def needs_reference(self) -> bool:
        """True if `ref_logp` is read."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """Fill in `weights` and every other field that `compute_loss` reads, such as `advantages`.

        It is called once per step, with all rows of the step.
        """
        ...

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """Loss of some rows of that batch. logp: [B, T]."""
        ...


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of a step's batch before it is trained on."""
    metrics = {"group/degenerate_frac": degenerate_fraction(batch)}
    if batch.prox_logp is not None:
        # The raw ratio: a correction would hide the effect that these two metrics show.
        ratio = exp_clamped(batch.prox_logp - batch.old_logp)
        metrics["correction/ess_frac"] = float(effective_sample_size(ratio, batch.mask))
        metrics["correction/chi2"] = float(chi2(ratio, batch.mask))
    return metrics


def degenerate_fraction(batch: Batch) -> float:
    """Share of groups whose known rewards, before shaping, are all equal.

    With a group baseline they give no gradient.
    """
    flat = degenerate(batch.scores, batch.group)
    return len(batch.group[flat].unique()) / len(batch.group.unique())
