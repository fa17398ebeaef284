"""The weights of a frozen model by name: saved, restored, reset, and proven to be nobody else's. What every kind of reference holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel


class FrozenWeights:
    """Parameters by name, tied ones once. They are changed in place only, so whoever else maps them sees the change."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RuntimeError if a weight requires gradients, or shares storage with one that the optimizer moves."""
        moved = {p.data_ptr() for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self._weights.items():
            if weight.requires_grad or weight.data_ptr() in moved:
                raise RuntimeError(f"reference weight '{name}' would be trained: the reference must be a frozen copy")

    def tensors(self) -> dict[str, Tensor]:
        """Weights by name, for a checkpoint."""
        return {f"reference/{name}": weight for name, weight in self._weights.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's reference weights back, in place."""
        for name, weight in self._weights.items():
            weight.copy_(tensors[f"reference/{name}"])

    @torch.no_grad()
    def reset(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights in, in place."""
        theirs = dict(policy.named_parameters())
        for name, weight in self._weights.items():
            weight.copy_(theirs[name])
