"""The trainer role, in words: one optimizer step for any loss it is handed."""

from __future__ import annotations

from typing import Protocol

from ..batch import Batch, Loss, Metrics


class TrainerRole(Protocol):
    """Holds parameters and optimizer; knows no algorithm."""

    @property
    def version(self) -> int:
        """Grows by one with every update; what rollouts are stamped with."""
        ...

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Train on the rows that weigh something; a step without any, or without a finite gradient, updates nothing and says so."""
        ...
