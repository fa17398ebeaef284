"""What a reward model minimises, and what it measures on held-out comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ..batch import Batch, LossOutput, Metrics, collate, filled
from ..checkpointable import Checkpointable
from ..errors import UserError
from ..preference.table import pair_table
from ..ranks import Ranks
from ..recipe.schema import RewardModelConfig, TrainerConfig
from ..trainer.logprobs import SCORED_TOGETHER, ScalarRoot, Scoring, score_tables
from ..trainer.sharded import place
from ..trainer.trained_weights import TrainedWeights
from ..types import Group
from .calibration import Calibration, calibrate, scaled
from .losses import binary_cross_entropy, bradley_terry, centring
from .model import saved_weights
from .quality import length_correlation, quality
from .rows import completion_lengths, completion_tokens, pairs_of, row_scores, scored_groups


@dataclass(frozen=True)
class RewardLoss:
    """Loss of a reward model. Each comparison has the same weight, whatever its number of pairs.

    Args:
        config: the recipe's [reward_model] section.
    """

    config: RewardModelConfig

    @property
    def paired(self) -> bool:
        """True for a loss of pairs, False for one of labelled completions."""
        return self.config.loss == "bradley_terry"

    def prepare(self, batch: Batch) -> Batch:
        """Fill in the weights, the units, and the pairs.

        The weight of a row's score is at its closing token: it averages over comparisons or
        completions. With `lm_weight`, the tokens of better completions are read and weighted too.

        Args:
            batch: rows as `scored_groups` makes them, on the host. Their rewards are grades.

        Raises:
            UserError: if a label is not between 0 and 1.
        """
        grade, mask, group = batch.scores, batch.mask, batch.group
        if self.paired:
            table, _ = pair_table(group, grade)
            chosen, rejected, _ = pairs_of(table)
            batch = batch.with_(pairs=table)
            counts = torch.isin(group, group[chosen]).float()
            better = (counts > 0).index_fill(0, rejected, False)
            total = group[chosen].unique().numel()
        else:
            counts, total, better = torch.ones(len(grade)), len(grade), grade > 0.5
            wrong = (grade < 0) | (grade > 1)
            if wrong.any():
                raise UserError(
                    f"reward_model.loss = 'bce' learns labels between 0 and 1, and a completion has"
                    f" {float(grade[wrong][0]):g}. Use loss = 'bradley_terry', which compares"
                )
        weights = torch.zeros(mask.shape)
        weights[torch.arange(len(mask)), batch.lengths - 1] = counts / max(total, 1)
        if self.config.lm_weight:
            said = completion_tokens(batch) & better[:, None]
            mask, weights = mask | said, weights + said * (1.0 / max(int(said.sum()), 1))
        return batch.with_(weights=weights, mask=mask, unit=group)

    def compute_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        """Weighted loss of some rows of that batch.

        Args:
            batch: whole units.
            values: [B, T] outputs of the head, or with `lm_weight` [B, T, 2] the same and log-probs
                of the tokens.
        """
        logp = None
        if self.config.lm_weight:
            values, logp = values.unbind(-1)
        scores, grade = row_scores(batch, values, self.config.head), batch.scores
        weights = filled(batch.weights, "weights")
        weight = weights.gather(1, batch.lengths[:, None] - 1)[:, 0]
        same = (batch.group[:, None] == batch.group).float()
        if self.paired:
            chosen, rejected, share = pairs_of(filled(batch.pairs, "pairs"))
            better, worse, weight_of_pair = scores[chosen], scores[rejected], weight[chosen] * share
            margin = grade[chosen] - grade[rejected] if self.config.margin else 0.0
            each = bradley_terry(better, worse, margin)
            if self.config.centring:
                each = each + self.config.centring * centring(better, worse)
            delta, weight = better - worse, weight / same.sum(-1)
        else:
            each, weight_of_pair = binary_cross_entropy(scores, grade), weight
            delta = torch.where(grade > 0.5, scores, -scores)
        loss = (weight_of_pair * each).sum() + 0.0 * scores.sum()
        text = {}
        if logp is not None:
            entropy = -torch.where(completion_tokens(batch), weights * logp, 0.0).sum()
            loss = loss + self.config.lm_weight * entropy
            text["reward_model/lm_loss"] = entropy.detach()
        right = torch.heaviside(delta.detach(), torch.tensor(0.5, device=delta.device))
        seen = scores.detach()
        return LossOutput(
            loss,
            {
                "train/loss": loss.detach(),
                **text,
                "reward_model/accuracy": (weight_of_pair * right).sum(),
                "reward_model/delta": (weight_of_pair * delta.detach()).sum(),
                "reward_model/score_mean": (weight * seen).sum(),
                "reward_model/score_std": (weight * seen.square()).sum(),  # see `derived`
            },
        )


class RewardObjective:
    """Objective of a supervised stage that trains a reward model.

    Args:
        root: the reward model.
        model: what is saved of it, whose configuration gets its calibration: the same as a module,
            or, if an adapter is trained, the model without it.
        config: the recipe's [reward_model] section.
        trainer: sizes of micro-batches.
        scoring: precision of the forward pass.
        ranks: the ranks that share the rows.
        device: device of the batches.
        calibrated: whether there are held-out comparisons, which set offset and scale. Otherwise
            the comparisons of the newest step do.
    """

    frozen = None

    def __init__(
        self,
        root: ScalarRoot,
        model: PreTrainedModel,
        config: RewardModelConfig,
        trainer: TrainerConfig,
        scoring: Scoring,
        ranks: Ranks,
        device: str,
        calibrated: bool,
    ) -> None:
        self.root, self._model, self._config, self._trainer = root, model, config, trainer
        self._scoring, self._ranks, self._device = scoring, ranks, device
        self._calibrated = calibrated
        self._loss = RewardLoss(config)
        self.compute_loss = self._loss.compute_loss

    def begin(self, examples: object) -> None:
        """Does nothing."""

    def components(self) -> Mapping[str, Checkpointable]:
        # An adapter cannot be read back from the merged weights of the model folder.
        return {"adapter": TrainedWeights(self.root.model)} if self._adapted else {}

    @property
    def _adapted(self) -> bool:
        return self.root.model is not self._model

    @torch.no_grad()
    def restored(self, model: Path) -> None:
        """Load weights and calibration, which a checkpoint has in its model folder."""
        Calibration.of(AutoConfig.from_pretrained(model)).write(self._model.config)
        if self._adapted:
            return
        saved = saved_weights(model)
        for name, weight in self._model.named_parameters():
            weight.copy_(place(weight, saved[name]))

    def batch(self, groups: Sequence[Group]) -> Batch:
        return self._loss.prepare(self._rows(groups)).to(self._device)

    def derived(self, metrics: Metrics) -> Metrics:
        """The metrics with a standard deviation in place of a mean square."""
        mean, square = metrics.get("reward_model/score_mean"), metrics.get("reward_model/score_std")
        if not isinstance(mean, float) or not isinstance(square, float):
            return metrics
        std = max(square - mean * mean, 0.0) ** 0.5
        if self._config.normalise and not self._calibrated:
            scaled(mean, std).write(self._model.config)
        return {**metrics, "reward_model/score_std": std}

    def heldout(self, examples: Sequence[Group]) -> Metrics:
        """Figures of held-out comparisons, which also set offset, scale and length slope."""
        scores, grades, lengths = self._scored(examples)
        groups = torch.repeat_interleave(
            torch.arange(len(examples)), torch.tensor([len(g.trajectories) for g in examples])
        )
        config = self._config
        found = calibrate(
            scores, lengths, groups, normalise=config.normalise, debias=config.length_debias
        )
        found.write(self._model.config)
        rewards = scores - found.length_slope * (lengths - found.length_mean)
        if self._loss.paired:
            chosen, rejected, share = pairs_of(pair_table(groups, grades)[0])
            if not len(chosen):
                return {}
            margin = grades[chosen] - grades[rejected] if config.margin else 0.0
            each = bradley_terry(scores[chosen], scores[rejected], margin)
            loss = float((each * share).sum() / share.sum())
            seen = quality(rewards[chosen] - rewards[rejected], groups[chosen])
        else:
            loss = float(binary_cross_entropy(scores, grades).mean())
            seen = quality(torch.where(grades > 0.5, rewards, -rewards), groups)
        return {
            "heldout/loss": loss,
            "reward_model/heldout_accuracy": seen.accuracy.mean,
            "reward_model/heldout_accuracy_low": seen.accuracy.low,
            "reward_model/heldout_accuracy_high": seen.accuracy.high,
            "reward_model/heldout_delta_hist": seen.histogram,
            "reward_model/heldout_healthy_frac": seen.healthy,
            "reward_model/heldout_calibration_error": seen.calibration_error,
            "reward_model/heldout_length_correlation": length_correlation(scores, lengths, groups),
        }

    def _scored(self, examples: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
        """Score, grade and length of every completion, each [N] float64 on the CPU."""
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for at in range(0, len(examples), SCORED_TOGETHER):
            batch = self._rows(examples[at : at + SCORED_TOGETHER]).to(self._device)
            values, _ = score_tables(
                self.root,
                batch,
                self._scoring,
                self._trainer.max_tokens_per_microbatch,
                self._trainer.share_prefix,
                self._ranks,
            )
            scores = row_scores(batch, values, self._config.head).double().cpu()
            columns.append((scores, batch.scores.double().cpu(), completion_lengths(batch).cpu()))
        scores, grades, lengths = (torch.cat(parts) for parts in zip(*columns, strict=True))
        return scores, grades, lengths

    def _rows(self, groups: Sequence[Group]) -> Batch:
        return collate(scored_groups(groups, self._config.head))
