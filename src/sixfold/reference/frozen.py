"""Reference by a frozen model in this process (a copy of the policy, or a teacher), scored by itself or by the trainer; and none at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..trainer.logprobs import Scoring, score_batch, score_row
from ..trainer.packing import PackedRow
from ..types import Group
from .weights import FrozenWeights


class NoReference:
    """For losses that look at no reference: leaves the batch as it is."""

    scorer = None

    def start(self, groups: Sequence[Group]) -> None:
        """Nothing."""

    def score(self, batch: Batch) -> Batch:
        """The batch unchanged."""
        return batch

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""

    def reset(self, policy: PreTrainedModel) -> None:
        """Nothing."""

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing can be trained."""

    def close(self) -> None:
        """Nothing."""


class FrozenReference(FrozenWeights):
    """A model without gradients, in evaluation mode; scores as the trainer does, at the sampling temperature.

    copy: keep a deep copy of `model`, which goes on to be trained; False takes over the model itself, which nobody else may train.
    """

    scorer = None

    def __init__(self, model: PreTrainedModel, scoring: Scoring, max_tokens: int, share_prefix: bool, *, copy: bool = True) -> None:
        self.model = _frozen(model, copy)
        super().__init__(dict(self.model.named_parameters()))
        self._scoring = scoring
        self._max_tokens = max_tokens
        self._share_prefix = share_prefix

    def start(self, groups: Sequence[Group]) -> None:
        """Nothing: this process is about to check answers."""

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False."""
        return batch.with_(ref_logp=score_batch(self.model, batch, self._scoring, self._max_tokens, self._share_prefix))

    def close(self) -> None:
        """Nothing to end."""


class FusedReference(FrozenWeights):
    """The same, asked by the trainer for each micro-batch right before the policy's own forward: rows are packed once, and rows without a weight are
    not scored. `ref_logp` is unknown until then, so nothing before the loss may read it."""

    def __init__(self, model: PreTrainedModel, scoring: Scoring, *, copy: bool = True) -> None:
        self.model = _frozen(model, copy)
        super().__init__(dict(self.model.named_parameters()))
        self._scoring = scoring

    def start(self, groups: Sequence[Group]) -> None:
        """Nothing."""

    def score(self, batch: Batch) -> Batch:
        """The batch unchanged: the trainer fills in ref_logp."""
        return batch

    @torch.no_grad()
    def scorer(self, row: PackedRow) -> Tensor:
        """Log-probs [S] of the row's scored tokens, in the order of row.target."""
        return score_row(self.model, row, self._scoring)[0]

    def close(self) -> None:
        """Nothing to end."""


def _frozen(model: PreTrainedModel, copy: bool) -> PreTrainedModel:
    return (deepcopy(model) if copy else model).requires_grad_(False).eval()
