"""The critic: values for a batch before the algorithm reads it; afterwards it learns from the returns that the algorithm made.

It is trained by the same `Trainer` as the policy: to that a value is a score like a log-prob, and a value loss a loss like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, LossOutput, Metrics, filled
from ..errors import UserError
from ..recipe.schema import CriticConfig, TrainerConfig
from ..trainer.logprobs import Scoring, score_tables
from ..trainer.optimizer_state import load_optimizer_tensors, optimizer_tensors
from ..trainer.trainer import Trainer
from .value_model import make_value_model, score_values

PREFIX = "critic/"
ValueLoss = Callable[[Batch, Tensor], LossOutput]
"""The loss of some rows of a batch from their values [B, T], weighted as a policy's is."""

RENAMED = {f"train/{key}": f"critic/{key}" for key in ("grad_norm", "learning_rate", "skipped")}


class Critic:
    """A value model with a trainer of its own; the learning rate is the critic's, all else as for the policy.

    total_steps: of the learning-rate schedule, in updates. epochs: passes over each batch. batches: how many it was given to learn from.
    Raises UserError where the policy's architecture has no value model of the form asked for, ValueError for `body = "none"`.
    """

    def __init__(
        self, policy: PreTrainedModel, config: CriticConfig, trainer: TrainerConfig, scoring: Scoring, total_steps: int, *, epochs: int = 1
    ) -> None:
        if config.body == "none":
            raise ValueError("critic.body = 'none': there is no critic to make")
        self.model = make_value_model(policy, config.body)
        changed: dict[str, object] = {"learning_rate": config.learning_rate}
        if config.body == "policy":
            changed["activation_checkpointing"] = "none"  # a head has no layers, and those of the policy are its own trainer's to set
        settings = trainer.model_copy(update=changed)
        self.trainer = Trainer(self.model, settings, scoring, total_steps, epochs=epochs, score=score_values)  # type: ignore[arg-type]
        self.batches = 0

    def score(self, batch: Batch) -> Batch:
        """The batch with values [B, T], without gradient: V of the state before token t, 0 where mask is False."""
        t = self.trainer
        values, _ = score_tables(t.model, batch, t.scoring, t.config.max_tokens_per_microbatch, t.config.share_prefix, score=t.score)
        return batch.with_(values=values)

    def update(self, batch: Batch, loss: ValueLoss) -> Metrics:
        """Learn from a batch with weights, values and returns; `loss` takes values [B, T] where a policy's takes log-probs.

        critic/loss, critic/grad_norm and whatever of `loss` is named critic/...; critic/explained_variance and critic/value_mean speak of the
        values at collection. critic/skipped counts updates not made; a batch in which nothing weighs has no loss and no gradient norm.
        Raises TrainingDiverged as the trainer does.
        """
        self.batches += 1

        def named(local: Batch, values: Tensor) -> LossOutput:
            output = loss(local, values)
            return LossOutput(output.loss, {**output.sums, "critic/loss": output.loss.detach()}, output.means)

        learned = self.trainer.train_step(batch, named)
        metrics = {RENAMED.get(key, key): value for key, value in learned.items() if key.startswith(PREFIX) or key in RENAMED}
        known = batch.mask & batch.scores.isfinite()[:, None]
        values, returns = filled(batch.values, "values")[known], filled(batch.returns, "returns")[known]
        return metrics | {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": float(values.double().mean()) if len(values) else 0.0,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name, for a checkpoint: critic/weights/NAME and critic/optimizer/KEY/NAME; the live ones, not copies."""
        weights = {f"{PREFIX}weights/{name}": p for name, p in self.model.named_parameters()}
        optimizer = optimizer_tensors(self.trainer.optimizer, self.model)
        return weights | {PREFIX + name: tensor for name, tensor in optimizer.items()}

    @property
    def counters(self) -> dict[str, int]:
        """What else a checkpoint must hold, as JSON."""
        t = self.trainer
        return {
            "critic_batches": self.batches,
            "critic_version": t.version,
            "critic_steps": t.steps,
            "critic_skipped_total": t.skipped_total,
            "critic_skipped_in_a_row": t.skipped_in_a_row,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Put a checkpoint's critic back, bit for bit, in place; tensors of other names are ignored.

        Raises UserError, before anything is changed, if the checkpoint holds no critic or one of another form.
        """
        if not any(name.startswith(PREFIX) for name in tensors):
            raise UserError("the checkpoint holds no critic: it was made with an algorithm that has none")
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        load_optimizer_tensors(self.trainer.optimizer, self.model, own)  # first: it refuses another model's names and shapes
        for name, p in self.model.named_parameters():
            p.copy_(own[f"weights/{name}"])
        self.batches = counters["critic_batches"]
        t = self.trainer
        t.version, t.steps = counters["critic_version"], counters["critic_steps"]
        t.skipped_total, t.skipped_in_a_row = counters["critic_skipped_total"], counters["critic_skipped_in_a_row"]

    def save(self, folder: Path) -> None:
        """Write a body of its own in Hugging Face form; `AutoModelForTokenClassification.from_pretrained(folder)` reads it back.

        A head on the policy has no such form and writes nothing: a checkpoint's tensors hold it.
        """
        if isinstance(self.model, PreTrainedModel):
            self.model.save_pretrained(folder)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R), population variances over tokens, [S] each: 1 is a perfect critic, 0 one no better than a constant, below 0 worse.

    0 where all returns are equal but for rounding (or there are none): nothing was there to explain.
    """
    values, returns = values.double(), returns.double()
    if len(returns) == 0 or float(returns.std(correction=0)) <= 1e-6 * max(1.0, float(returns.abs().max())):
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0))
