"""Settings of the output head in the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..model.head import LogitFinish


@dataclass(frozen=True)
class HeadSettings:
    """Settings for computing log-probs from hidden states.

    Attributes:
        finish: the architecture's scaling and soft cap.
        chunk: positions per chunk.
        product: dtype of the factors of the matrix product. None: that of the weights.
        direct: whether the backward pass may add the gradient of the weight to its `.grad` itself,
            instead of returning it to autograd.
    """

    finish: LogitFinish
    temperature: float
    chunk: int
    product: torch.dtype | None = None
    entropy_gradient: bool = False
    direct: bool = False

    @property
    def factor(self) -> float:
        """Factor between the matrix product and the logits, without a soft cap."""
        return (self.finish.factor or 1.0) / (self.finish.divisor or 1.0) / self.temperature
