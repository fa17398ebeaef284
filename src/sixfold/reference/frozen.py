"""References that run in this process: none, a frozen model, or one that the trainer calls.

The frozen model is a copy of the policy, or a teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import Batch
from ..model.shared_module import shared_copy
from ..ranks import ALONE, Ranks
from ..trainer.logprobs import PolicyRoot, Scores, Scoring, score_tables
from ..trainer.packing import PackedRow
from ..types import Group
from .weights import FrozenWeights


class NoReference:
    """For losses that use no reference: leaves the batch unchanged."""

    scorer = None

    def start(self, groups: Sequence[Group]) -> None:
        """Does nothing."""

    def score(self, batch: Batch) -> Batch:
        return batch

    def tensors(self) -> dict[str, Tensor]:
        """Empty: there are no weights."""
        return {}

    def state(self) -> dict[str, Any]:
        """Empty: there is no state."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Does nothing."""

    def reset(self, policy: nn.Module) -> None:
        """Does nothing."""

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: there are no weights."""

    def close(self) -> None:
        """Does nothing."""


class FrozenReference(FrozenWeights):
    """A model without gradients, in evaluation mode, that scores as the trainer does.

    Args:
        model: the policy, or a teacher.
        scoring: sampling temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
        copy: keep a deep copy of `model`, which may then be trained further. False uses `model`
            itself, which nothing else may train.
        base: the frozen base of a LoRA policy. Its parameters, which `model` shares, are neither
            copied, reset nor saved here. None: `model` has parameters of its own only.
        offload: keep the weights in host memory, except while the model scores.
        root: root on `model` that is sharded over the ranks. None: there is one rank.
    """

    scorer = None

    def __init__(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        max_tokens: int,
        share_prefix: bool,
        *,
        copy: bool = True,
        base: nn.Module | None = None,
        offload: bool = False,
        root: PolicyRoot | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = _freeze(model, copy, base)
        self._host = HostWeights(self.model) if offload else None
        super().__init__(self._host.weights if self._host else _own_weights(self.model, base))
        self._root = root or PolicyRoot(self.model)
        self._ranks = ranks
        self._scoring = scoring
        self._max_tokens = max_tokens
        self._share_prefix = share_prefix

    def start(self, groups: Sequence[Group]) -> None:
        """Does nothing: this process is about to check answers."""

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False."""
        budget = self._max_tokens, self._share_prefix
        with self._host.on_device() if self._host else nullcontext():
            logp, _ = score_tables(self._root, batch, self._scoring, *budget, self._ranks)
        return batch.with_(ref_logp=logp)

    def close(self) -> None:
        """Does nothing: there is no process to end."""


class FusedReference(FrozenWeights):
    """A frozen model that the trainer calls per micro-batch, before the policy's forward pass.

    Rows are packed once, and rows without weight are not scored. `ref_logp` is unknown until then,
    so nothing before the loss may read it.

    Args:
        model: the policy, or a teacher.
        scoring: sampling temperature, chunk size and precision.
        copy: keep a deep copy of `model`. False uses `model` itself, which nothing else may train.
        base: as for `FrozenReference`.
        root: as for `FrozenReference`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        *,
        copy: bool = True,
        base: nn.Module | None = None,
        root: PolicyRoot | None = None,
    ) -> None:
        self.model = _freeze(model, copy, base)
        super().__init__(_own_weights(self.model, base))
        self._root = root or PolicyRoot(self.model)
        self._scoring = scoring

    def start(self, groups: Sequence[Group]) -> None:
        """Does nothing."""

    def score(self, batch: Batch) -> Batch:
        """The batch unchanged: the trainer fills in ref_logp."""
        return batch

    @torch.no_grad()
    def scorer(self, row: PackedRow) -> Tensor:
        """Log-probs [S] of the row's scored tokens, in the order of row.target."""
        scores: Scores = self._root(row, self._scoring)
        return scores.values

    def close(self) -> None:
        """Does nothing: there is no process to end."""


class HostWeights:
    """Keeps the parameters of `model` in host memory, pinned for a GPU, except while it runs.

    Attributes:
        weights: parameters in host memory by name, tied ones once. To change them, write in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {}
        for name, p in self._parameters.items():
            host = torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda)
            self.weights[name] = host.copy_(p.detach())
        self._free()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            for name, p in self._parameters.items():
                p.data = self.weights[name].to(p.device, non_blocking=True)
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for p in self._parameters.values():
            p.data = p.new_empty(0)


def _freeze(model: PreTrainedModel, copy: bool, base: nn.Module | None) -> PreTrainedModel:
    """The model of a reference. Arguments are those of `FrozenReference`."""
    if base is None:
        return (deepcopy(model) if copy else model).requires_grad_(False).eval()
    shared = {id(p) for p in base.parameters()}
    return (
        shared_copy(model, {id(p) for p in model.parameters()} - shared)
        .requires_grad_(False)
        .eval()
    )


def _own_weights(model: nn.Module, base: nn.Module | None) -> dict[str, Tensor]:
    """Weights of the model by name, without those that it shares with the base."""
    shared = set() if base is None else {id(p) for p in base.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in shared}
