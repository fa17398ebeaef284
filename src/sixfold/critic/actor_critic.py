"""Trainer with a critic: two trainers that take turns on one batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batch import Batch, Loss, LossOutput, Metrics, filled
from ..trainer.trainer import Trainer
from .critic import Critic


class ValueObjective(Protocol):
    """Methods that an algorithm with a critic must have."""

    def value_batch(self, batch: Batch) -> Batch:
        """The step's batch with the weights of the critic's loss.

        They can differ from the policy's: a token may train the critic and not the policy.
        """
        ...

    def compute_value_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        """Critic loss of some rows of that batch. values: [B, T].

        Its metrics are named `critic/...`: those of the policy's loss are logged beside them.
        """
        ...


class ActorCritic:
    """Trains the critic on the batch, then the policy. Trainer properties are the policy's.

    The critic goes first: a head on the policy's features must learn from the same features from
    which its values were computed.

    Args:
        objective: gives the critic's weights and loss.
        warmup_steps: steps at the start in which only the critic learns. The critic counts them,
            and its checkpoint holds the count.
    """

    def __init__(
        self, actor: Trainer, critic: Critic, objective: ValueObjective, warmup_steps: int
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.objective = objective
        self.warmup_steps = warmup_steps
        self.skip_reason = ""

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Update the critic, then the policy.

        During warm-up `train/skipped` is 1 and the weight version does not change.

        Returns:
            Metrics of both.

        Raises:
            TrainingDiverged: if either had no finite gradient for several updates in a row.
        """
        learned = self.critic.update(
            self.objective.value_batch(batch), self.objective.compute_value_loss
        )
        if self.critic.batches <= self.warmup_steps:
            # With all weights zero the policy's trainer makes no update but reports its metrics.
            metrics = self.actor.train_step(
                batch.with_(weights=torch.zeros_like(filled(batch.weights, "weights"))), loss
            )
            self.skip_reason = (
                f"only the critic learns, warm-up step {self.critic.batches} of {self.warmup_steps}"
            )
        else:
            metrics = self.actor.train_step(batch, loss)
            self.skip_reason = self.actor.skip_reason
        return {**metrics, **learned}

    @property
    def version(self) -> int:
        """Updates of the policy. Rollouts are stamped with it."""
        return self.actor.version

    @property
    def steps(self) -> int:
        return self.actor.steps

    @property
    def spikes(self) -> list[str]:
        """Gradient spikes of the last step: the critic's, then the policy's."""
        return [f"critic: {line}" for line in self.critic.trainer.spikes] + self.actor.spikes

    @property
    def skipped_total(self) -> int:
        """Updates of the policy that were skipped because the gradient was not finite."""
        return self.actor.skipped_total

    @property
    def optimizer(self) -> Optimizer:
        return self.actor.optimizer

    @property
    def model(self) -> nn.Module:
        return self.actor.model
