"""The contract of an algorithm: advantages and weights from rewards, a loss from log-probs. Tensors in, tensors out; no model, no task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..batch import Batch, LossOutput
from .advantages import degenerate
from .aggregation import AGGREGATIONS
from .kl import KL
from .table import AlgorithmDefaults


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


@dataclass(frozen=True)
class Settings:
    """A row of the zoo with the recipe's overrides, and the horizon: the longest completion the run allows."""

    defaults: AlgorithmDefaults
    horizon: int

    @property
    def needs_reference(self) -> bool:
        """A KL is measured against a reference only where it has a weight."""
        return self.defaults.beta > 0

    def scores(self, batch: Batch) -> Tensor:
        """[B] rewards, less beta times the sampled KL where the KL belongs in the reward."""
        d = self.defaults
        if d.kl_in == "loss" or not self.needs_reference:
            return batch.scores
        return batch.scores - d.beta * torch.where(batch.mask, self._kl(batch.old_logp, batch), 0.0).sum(-1)

    def fill(self, batch: Batch, advantages: Tensor) -> Batch:
        """Spread advantages [B] over each row's sampled tokens and add the aggregation's weights.

        Rows that cannot move the loss (a degenerate group or a failed check, no KL term) get weight 0 after the denominators are fixed: the
        gradient is the same, and the trainer need not compute them.
        """
        weights = AGGREGATIONS[self.defaults.aggregation](batch.mask, batch.group, self.horizon)
        failed = ~batch.scores.isfinite()
        still = failed if self.kl_in_loss else failed | (advantages == 0)
        weights = torch.where(still[:, None], 0.0, weights)
        return batch.with_(advantages=advantages[:, None] * batch.mask, weights=weights)

    @property
    def kl_in_loss(self) -> bool:
        """True when beta * KL is a term of the loss."""
        return self.needs_reference and self.defaults.kl_in == "loss"

    def assemble(self, batch: Batch, logp: Tensor, token_loss: Tensor, means: dict[str, Tensor]) -> LossOutput:
        """Weigh the token losses, add beta * KL where it is in the loss, and report both parts."""
        weights = _filled(batch.weights, "weights")
        policy_loss = torch.where(batch.mask, weights * token_loss, 0.0).sum()
        sums = {"train/pg_loss": policy_loss.detach()}
        loss = policy_loss
        if self.needs_reference:
            kl = self._kl(logp, batch)
            means = {**means, "train/kl": kl.detach()}
            if self.kl_in_loss:
                loss = loss + self.defaults.beta * torch.where(batch.mask, weights * kl, 0.0).sum()
        return LossOutput(loss, {**sums, "train/loss": loss.detach()}, means)

    def _kl(self, logp: Tensor, batch: Batch) -> Tensor:
        return KL[self.defaults.kl](logp, _filled(batch.ref_logp, "ref_logp"))


def advantages_of(batch: Batch) -> Tensor:
    """The batch's advantages. Raises ValueError before compute_advantages has run."""
    return _filled(batch.advantages, "advantages")


def degenerate_fraction(batch: Batch) -> float:
    """Share of groups whose known rewards are all equal: they teach nothing. Reads the raw rewards."""
    flat = degenerate(batch.scores, batch.group)
    return len(batch.group[flat].unique()) / len(batch.group.unique())


def _filled(field_: Tensor | None, name: str) -> Tensor:
    if field_ is None:
        raise ValueError(f"batch.{name} is not filled in yet")
    return field_
