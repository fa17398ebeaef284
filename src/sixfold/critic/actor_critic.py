"""The trainer role where a critic learns beside the policy: two trainers, in turn, on one batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..batch import Batch, Loss, LossOutput, Metrics, filled
from ..trainer.trainer import Trainer
from .critic import Critic


class ValueObjective(Protocol):
    """What an algorithm with a critic asks of it."""

    def value_batch(self, batch: Batch) -> Batch:
        """The step's batch with the weights that the critic's loss has: a token may teach the critic and not the policy."""
        ...

    def compute_value_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        """The critic's loss of some rows of that batch."""
        ...


class ActorCritic:
    """First the critic learns from the batch, then the policy; what a trainer is asked about itself is answered by the policy's.

    The critic goes first because a head on the policy's features must learn from the features that its values were made of. warmup_steps: steps
    at the start in which only the critic learns; they are counted by the critic, whose checkpoint holds the count.
    """

    def __init__(self, actor: Trainer, critic: Critic, objective: ValueObjective, warmup_steps: int) -> None:
        self.actor = actor
        self.critic = critic
        self.objective = objective
        self.warmup_steps = warmup_steps
        self.skip_reason = ""

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """The critic's updates and the policy's; the metrics of both. In the warm-up `train/skipped` is 1 and the weight version stays.

        Raises TrainingDiverged if either had no finite gradient for several updates in a row.
        """
        learned = self.critic.update(self.objective.value_batch(batch), self.objective.compute_value_loss)
        if self.critic.batches <= self.warmup_steps:
            # A batch in which nothing weighs: the policy's trainer makes no update and reports all that it reports in such a step.
            metrics = self.actor.train_step(batch.with_(weights=torch.zeros_like(filled(batch.weights, "weights"))), loss)
            self.skip_reason = f"only the critic learns, warm-up step {self.critic.batches} of {self.warmup_steps}"
        else:
            metrics = self.actor.train_step(batch, loss)
            self.skip_reason = self.actor.skip_reason
        return {**metrics, **learned}

    @property
    def version(self) -> int:
        """Updates of the policy: what rollouts are stamped with."""
        return self.actor.version

    @property
    def steps(self) -> int:
        """Updates of the policy attempted."""
        return self.actor.steps

    @property
    def skipped_total(self) -> int:
        """Updates of the policy not made for want of a finite gradient."""
        return self.actor.skipped_total

    @property
    def optimizer(self) -> Optimizer:
        """The policy's optimizer."""
        return self.actor.optimizer

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self.actor.model
