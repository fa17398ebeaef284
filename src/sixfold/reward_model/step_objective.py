"""What a process reward model minimises, and what it measures on held-out solutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, LossOutput, Metrics, collate, filled
from ..checkpointable import Checkpointable
from ..ranks import Ranks
from ..recipe.schema import TrainerConfig
from ..trainer.logprobs import SCORED_TOGETHER, ScalarRoot, Scoring, score_tables
from ..trainer.sharded import place
from ..types import Group
from .losses import binary_cross_entropy
from .rows import completion_tokens
from .step_model import saved_weights
from .step_quality import THRESHOLD, UNLABELLED, step_quality


class StepLoss:
    """Mean over solutions of the mean cross-entropy of their labelled steps.

    With a weight of the text, the mean cross-entropy of the tokens of each right solution is added:
    of each without a step labelled wrong.

    Args:
        lm_weight: weight of the text.
    """

    def __init__(self, lm_weight: float = 0.0) -> None:
        self._lm_weight = lm_weight

    def prepare(self, batch: Batch) -> Batch:
        """Fill in the weights.

        Args:
            batch: rows as `step_row` makes them.
        """
        labelled = batch.mask & (batch.rewards != UNLABELLED)
        counts = labelled.sum(-1, keepdim=True)
        mask = batch.mask | completion_tokens(batch) if self._lm_weight else batch.mask
        weights = labelled / (counts.clamp_min(1) * len(counts))
        return batch.with_(weights=weights, mask=mask)

    def compute_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        """Weighted loss of some rows of that batch.

        Args:
            batch: rows.
            values: [B, T] logits that the step before each token is right, or with a weight of the
                text [B, T, 2] the same and log-probs of the tokens.
        """
        weights, labels = filled(batch.weights, "weights"), batch.rewards
        logp = None
        if self._lm_weight:
            values, logp = values.unbind(-1)
        loss = (weights * binary_cross_entropy(values, labels)).sum()
        text = {}
        if logp is not None:
            wrong = ((weights > 0) & (labels < THRESHOLD)).any(-1)
            weight, tokens = weights.sum(-1) * ~wrong, completion_tokens(batch)
            each = -torch.where(tokens, logp, 0.0).sum(-1) / tokens.sum(-1)
            text["prm/lm_loss"] = (weight * each).sum()
            loss = loss + self._lm_weight * text["prm/lm_loss"]
        right = ((values >= 0) == (labels >= THRESHOLD)).float()
        sums = {"train/loss": loss, **text, "prm/accuracy": (weights * right).sum()}
        return LossOutput(loss, {name: value.detach() for name, value in sums.items()})


class StepObjective:
    """Objective of a supervised stage that trains a process reward model.

    Args:
        root: the model.
        model: the same as a module.
        lm_weight: weight of the text, see `StepLoss`.
        trainer: sizes of micro-batches.
        scoring: precision of the forward pass.
        ranks: the ranks that share the rows.
        device: device of the batches.
    """

    frozen = None

    def __init__(
        self,
        root: ScalarRoot,
        model: PreTrainedModel,
        lm_weight: float,
        trainer: TrainerConfig,
        scoring: Scoring,
        ranks: Ranks,
        device: str,
    ) -> None:
        self.root, self._model, self._trainer = root, model, trainer
        self._scoring, self._ranks, self._device = scoring, ranks, device
        self._loss = StepLoss(lm_weight)
        self.compute_loss = self._loss.compute_loss

    def begin(self, examples: object) -> None:
        """Does nothing."""

    def components(self) -> Mapping[str, Checkpointable]:
        return {}

    @torch.no_grad()
    def restored(self, model: Path) -> None:
        """Load the weights, which a checkpoint has in its model folder."""
        saved = saved_weights(model)
        for name, weight in self._model.named_parameters():
            weight.copy_(place(weight, saved[name]))

    def batch(self, groups: Sequence[Group]) -> Batch:
        return self._loss.prepare(collate(groups).to(self._device))

    def derived(self, metrics: Metrics) -> Metrics:
        return metrics

    def heldout(self, examples: Sequence[Group]) -> Metrics:
        """Figures of held-out solutions."""
        values, labels = self._scored(examples)
        losses = []
        for value, label in zip(values, labels, strict=True):
            known = label != UNLABELLED
            losses.append(float(binary_cross_entropy(value[known], label[known]).mean()))
        found = step_quality([value.sigmoid() for value in values], labels)
        metrics = {
            "heldout/loss": sum(losses) / len(losses),
            "prm/heldout_accuracy": found.accuracy,
            "prm/heldout_calibration_error": found.calibration_error,
            "prm/heldout_error_found": found.error_found,
            "prm/heldout_all_right": found.all_right,
            "prm/heldout_first_error_f1": found.first_error_f1,
        }
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def _scored(self, examples: Sequence[Group]) -> tuple[list[Tensor], list[Tensor]]:
        """Logit and label of each step, float64 on the CPU, by solution."""
        values: list[Tensor] = []
        labels: list[Tensor] = []
        for at in range(0, len(examples), SCORED_TOGETHER):
            batch = collate(examples[at : at + SCORED_TOGETHER]).to(self._device)
            table, _ = score_tables(
                self.root,
                batch,
                self._scoring,
                self._trainer.max_tokens_per_microbatch,
                self._trainer.share_prefix,
                self._ranks,
            )
            for row, mask in enumerate(batch.mask):
                values.append(table[row, mask].double().cpu())
                labels.append(batch.rewards[row, mask].double().cpu())
        return values, labels
