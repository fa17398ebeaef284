"""Keep the weights of a frozen model in host memory, and on its device only while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class HostWeights:
    """Moves the parameters of `model` to host memory. For a GPU the memory is pinned.

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
        """Context in which the model's weights are on its device."""
        try:
            for name, p in self._parameters.items():
                p.data = self.weights[name].to(p.device, non_blocking=True)
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for p in self._parameters.values():
            p.data = p.new_empty(0)
