"""The contract of an algorithm: advantages and weights from rewards, a loss from log-probs. Tensors
in, tensors out; no model, no task.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..batch import Batch, LossOutput
from .advantages import degenerate
from .losses import exp_clamped
from .off_policy import chi2, effective_sample_size


class Algorithm(Protocol):
    """The two methods of an algorithm, and whether it needs `ref_logp`."""

    @property
    def needs_reference(self) -> bool: ...

    def compute_advantages(self, batch: Batch) -> Batch:
        """The step's batch with `advantages` and `weights` filled in, over all its rows at once."""
        ...

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """The loss of some rows of that batch."""
        ...


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What can be said of a step's batch before it is trained on."""
    metrics = {"group/degenerate_frac": degenerate_fraction(batch)}
    if batch.prox_logp is not None:
        ratio = exp_clamped(
            batch.prox_logp - batch.old_logp
        )  # as it is: a correction hides what these two are about
        metrics["correction/ess_frac"] = float(effective_sample_size(ratio, batch.mask))
        metrics["correction/chi2"] = float(chi2(ratio, batch.mask))
    return metrics


def degenerate_fraction(batch: Batch) -> float:
    """Share of groups whose known rewards are all equal: they teach a group baseline nothing. Reads
    the raw rewards.
    """
    flat = degenerate(batch.scores, batch.group)
    return len(batch.group[flat].unique()) / len(batch.group.unique())
