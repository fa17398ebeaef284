"""Reference by a frozen copy, and none at all where the loss has no KL term."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..batch import Batch
from ..trainer.logprobs import Scoring, score_batch


class NoReference:
    """For losses without a KL term: leaves the batch as it is."""

    def score(self, batch: Batch) -> Batch:
        """The batch unchanged."""
        return batch


class FrozenReference:
    """A deep copy of the policy as it was, without gradients, in evaluation mode; scores as the trainer does, at the sampling temperature."""

    def __init__(self, policy: PreTrainedModel, scoring: Scoring, max_tokens: int, share_prefix: bool) -> None:
        self.model = copy.deepcopy(policy).requires_grad_(False).eval()
        self._scoring = scoring
        self._max_tokens = max_tokens
        self._share_prefix = share_prefix

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False."""
        return batch.with_(ref_logp=score_batch(self.model, batch, self._scoring, self._max_tokens, self._share_prefix))

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RuntimeError if a reference parameter requires gradients, or shares storage with one that the optimizer moves."""
        moved = {p.data_ptr() for group in optimizer.param_groups for p in group["params"]}
        for name, p in self.model.named_parameters():
            if p.requires_grad or p.data_ptr() in moved:
                raise RuntimeError(f"reference weight '{name}' would be trained: the reference must be a frozen copy")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by name, for a checkpoint; tied ones once."""
        return {f"reference/{name}": p for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a checkpoint's reference weights back, in place."""
        for name, p in self.model.named_parameters():
            p.copy_(tensors[f"reference/{name}"])

    @torch.no_grad()
    def reset(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights in, in place."""
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs)
