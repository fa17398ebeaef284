"""The critic: computes values before the algorithm reads the batch, then learns from the returns.

It is trained by the same `Trainer` as the policy. To the trainer, a value is a score like a
log-prob, and a value loss is a loss like any other. The value loss names its metrics `critic/...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, Loss, Metrics, filled
from ..checkpointable import check_names, check_tensors
from ..model.trained_lora import TrainedLora
from ..ranks import ALONE, Ranks
from ..recipe.schema import CriticConfig, TrainerConfig
from ..trainer.logprobs import PolicyRoot, Scoring, score_tables
from ..trainer.sharded import Shards, whole
from ..trainer.trained_weights import TrainedWeights
from ..trainer.trainer import Trainer
from .value_model import AdapterValueModel, make_value_root

WEIGHTS = "weights/"


class Critic:
    """A value model with its own trainer.

    Only the learning rate differs from the policy's settings. `batches` counts the batches that the
    critic has learned from.

    Args:
        policy: the policy. It supplies the architecture and the initial body weights, or the hidden
            states that a head reads.
        scoring: temperature, chunk size and precision.
        total_steps: length of the learning-rate schedule, in updates.
        epochs: passes over each batch.
        ranks: the ranks that train the critic together.
        shards: how the policy is sharded over them. The critic is sharded alike.
        whole_policy: the policy in one piece, if it is sharded.
        lora: the policy's adapter. A critic with a body of its own then gets an adapter of its own
            on the same base. None: all weights of the policy are trained.

    Raises:
        UserError: if the policy's architecture has no value model of the requested kind.
        ValueError: for `body = "none"`.
    """

    def __init__(
        self,
        policy: PolicyRoot,
        config: CriticConfig,
        trainer: TrainerConfig,
        scoring: Scoring,
        total_steps: int,
        *,
        epochs: int = 1,
        ranks: Ranks = ALONE,
        shards: Shards | None = None,
        whole_policy: PreTrainedModel | None = None,
        lora: TrainedLora | None = None,
    ) -> None:
        if config.body == "none":
            raise ValueError("critic.body = 'none': there is no critic to make")
        root = make_value_root(policy, config.body, whole_policy, lora)
        self.model = root.model
        self._weights = TrainedWeights(self.model)
        if shards:
            shards.shard(root, lora.base.parameters() if lora else ())
        changed: dict[str, object] = {"learning_rate": config.learning_rate}
        if config.body == "policy":
            # A head has no layers, and the policy's trainer sets those of the policy.
            changed["activation_checkpointing"] = "none"
        settings = trainer.model_copy(update=changed)
        self.trainer = Trainer(root, settings, scoring, total_steps, epochs=epochs, ranks=ranks)
        self.batches = 0

    def score(self, batch: Batch) -> Batch:
        """The batch with values [B, T], without gradient.

        The value of token t is V of the state before t; it is 0 where mask is False.
        """
        t = self.trainer
        values, _ = score_tables(
            t.root,
            batch,
            t.scoring,
            t.config.max_tokens_per_microbatch,
            t.config.share_prefix,
            t.ranks,
        )
        return batch.with_(values=values)

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn from a batch with weights, values and returns.

        `critic/explained_variance` and `critic/value_mean` refer to the values at collection.
        `critic/skipped` counts updates not made. If all weights are zero, there is no loss and no
        gradient norm.

        Args:
            loss: takes values [B, T] where a policy's loss takes log-probs.

        Returns:
            The metrics of the loss, critic/grad_norm, critic/learning_rate, and those above.

        Raises:
            TrainingDiverged: as the trainer does.
        """
        self.batches += 1
        learned = self.trainer.learn(batch, loss)
        norm: Metrics = {} if learned.grad_norm is None else {"critic/grad_norm": learned.grad_norm}
        known = batch.mask & batch.scores.isfinite()[:, None]
        values, returns = (
            filled(batch.values, "values")[known],
            filled(batch.returns, "returns")[known],
        )
        return {
            **learned.metrics,
            **norm,
            "critic/learning_rate": learned.learning_rate,
            "critic/skipped": float(learned.skipped),
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": float(values.double().mean()) if len(values) else 0.0,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Trained weights as weights/NAME, and the trainer's tensors, for a checkpoint."""
        return self._trained() | self.trainer.tensors()

    def state(self) -> dict[str, int]:
        return {"batches": self.batches, **self.trainer.state()}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        check_names(self.state(), state, "value")
        given = {name: t for name, t in tensors.items() if name.startswith(WEIGHTS)}
        check_tensors(self._trained(), given)  # before the trainer is changed
        others = {name: t for name, t in tensors.items() if name not in given}
        self.trainer.load(others, {k: v for k, v in state.items() if k != "batches"})
        self._weights.load({n.removeprefix(WEIGHTS): t for n, t in given.items()}, {})
        self.batches = state["batches"]

    def _trained(self) -> dict[str, Tensor]:
        return {WEIGHTS + name: weight for name, weight in self._weights.tensors().items()}

    def save(self, folder: Path) -> None:
        """Write a critic with its own body in Hugging Face form, or its adapter in PEFT's.

        `AutoModelForTokenClassification.from_pretrained` reads a whole model back. PEFT adds an
        adapter, with the head, to such a model of the base. A head on the policy has no such form
        and writes nothing: the checkpoint's tensors hold it. All ranks call this, and rank 0
        writes.
        """
        if isinstance(self.model, AdapterValueModel):
            trained = {n: whole(p) for n, p in self.model.named_parameters() if p.requires_grad}
            if self.trainer.ranks.rank == 0:
                self.model.save(folder, trained)
        elif isinstance(self.model, PreTrainedModel):
            weights = {name: whole(t) for name, t in self.model.state_dict().items()}
            if self.trainer.ranks.rank == 0:
                self.model.save_pretrained(folder, state_dict=weights)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Explained variance, 1 - Var(R - V) / Var(R), with population variances over tokens.

    1 is a perfect critic, 0 is no better than a constant, below 0 is worse. values and returns are
    [S].

    Returns:
        0 if there are no returns, or if they are all equal up to rounding.
    """
    values, returns = values.double(), returns.double()
    if len(returns) == 0 or float(returns.std(correction=0)) <= 1e-6 * max(
        1.0, float(returns.abs().max())
    ):
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0))
