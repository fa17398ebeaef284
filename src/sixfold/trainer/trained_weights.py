"""The trained parameters of a module that has frozen ones too, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpointable import check_names, check_tensors
from .sharded import place


class TrainedWeights:
    """Checkpointable form of the parameters that require gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters, by their names in the module."""
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Any]:
        """Empty."""
        return {}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        own = self.tensors()
        check_names((), state, "value")
        check_tensors(own, tensors)
        for name, weight in own.items():
            weight.copy_(place(weight, tensors[name]))
