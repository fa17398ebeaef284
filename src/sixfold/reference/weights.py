"""Weights of a frozen model by name: save, restore, reset, and check that nothing trains them.

Every kind of reference with weights uses this class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpointable import check_names, check_tensors
from ..trainer.sharded import own_part, place, whole


class FrozenWeights:
    """Parameters by name, tied ones once.

    They are only changed in place, so every process that maps them sees the change.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        moved = {own_part(p).data_ptr() for p in trained if own_part(p).numel()}
        for name, weight in self._weights.items():
            if weight.requires_grad or own_part(weight).data_ptr() in moved:
                raise RuntimeError(
                    f"reference weight '{name}' would be trained: the reference must be a frozen"
                    " copy"
                )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._weights)

    def state(self) -> dict[str, Any]:
        """Empty: the weights are the whole state."""
        return {}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        check_names((), state, "value")
        check_tensors(self._weights, tensors)
        for name, weight in self._weights.items():
            weight.copy_(place(weight, tensors[name]))

    @torch.no_grad()
    def reset(self, policy: nn.Module) -> None:
        theirs = dict(policy.named_parameters())
        for name, weight in self._weights.items():
            sharded = isinstance(weight, DTensor)
            weight.copy_(theirs[name] if sharded else whole(theirs[name]))
