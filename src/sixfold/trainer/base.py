"""The trainer role: a protocol for one optimizer step with any loss."""

from __future__ import annotations

from typing import Protocol

from ..batch import Batch, Loss, Metrics


class TrainerRole(Protocol):
    """Holds the parameters and the optimizer. It does not depend on the algorithm."""

    @property
    def version(self) -> int:
        """Weight version.

        It increases by one with every update, and rollouts are stamped with it.
        """
        ...

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Train on the rows with nonzero weights.

        If no row has weight, or if the gradient is not finite, the step updates nothing and its
        metrics say so.
        """
        ...
