"""Forward, backward and update for any loss. The only place where backward runs.

The trainer does not depend on the algorithm: a loss takes rows of the batch and their scores (a
policy's log-probs or a critic's values). Only rows with nonzero weights are computed. They are
packed and processed in micro-batches. Weights are fixed for the whole step, so the gradient does
not depend on how rows are split into micro-batches.

Terms:

  step      one call from the loop: `epochs` passes over a batch. Each pass makes one update per
            mini-batch (`batch.minibatch`), or one update if it is not set.
  update    one AdamW step. The weight version counts updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, Loss, LossOutput, Metrics, check_mask, filled, upload
from ..checkpointable import check_names
from ..recipe.schema import TrainerConfig
from .checkpointing import apply_activation_checkpointing
from .logprobs import Score, Scoring, score_row
from .mismatch import log_ratio_metrics, mismatch_metrics
from .optimizer import learning_rate, make_optimizer
from .optimizer_state import load_optimizer_tensors, optimizer_tensors
from .packing import PackedRow, microbatches, pack


class TrainingDiverged(RuntimeError):
    """Several steps in a row had no finite loss or gradient."""


class EngineDisagrees(TrainingDiverged):
    """Engine and trainer log-probs differ so much that ratios are noise. No update was made."""


@dataclass
class _Totals:
    """Sums over the micro-batches of an update.

    Numbers stay on the device until the last micro-batch, so the host synchronises once.

    Attributes:
        computed: tokens computed.
        rows: rows of each micro-batch.
        losses: loss of each micro-batch.
        sums: by metric name, one number per micro-batch, to be added.
        means: by metric name, one number per micro-batch, to be averaged over scored tokens.
        logp: log-probs of the scored tokens of each micro-batch.
        old_logp: log-probs at sampling of the same tokens.
        fresh: on the host, True for tokens sampled from the current weights.
    """

    computed: int = 0
    rows: list[Sequence[int]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    means: dict[str, list[Tensor]] = field(default_factory=dict)
    logp: list[Tensor] = field(default_factory=list)
    old_logp: list[Tensor] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)

    def read(self, norm: Tensor) -> _Read:
        """Read everything as Python numbers, in one copy from the device."""
        named = [
            (kind, name, len(values))
            for kind in (self.sums, self.means)
            for name, values in kind.items()
        ]
        columns = [*self.losses, *(value for kind, name, _ in named for value in kind[name]), norm]
        numbers = torch.stack([x.detach().double() for x in columns]).tolist()
        bad_rows = [
            b
            for loss, rows in zip(numbers, self.rows, strict=False)
            if not math.isfinite(loss)
            for b in rows
        ]
        at, sums, means = len(self.losses), dict[str, float](), dict[str, float]()
        for kind, name, count in named:
            (sums if kind is self.sums else means)[name] = sum(numbers[at : at + count])
            at += count
        tokens = max(sum(map(len, self.logp)), 1)
        return _Read(
            bad_rows,
            numbers[-1],
            {**sums, **{name: total / tokens for name, total in means.items()}},
        )

    def fresh_logp(self) -> tuple[Tensor, Tensor]:
        """Log-probs and log-probs at sampling of the fresh tokens, [F] each."""
        logp, old_logp, fresh = (
            torch.cat(self.logp),
            torch.cat(self.old_logp),
            torch.cat(self.fresh),
        )
        if bool(fresh.all()):
            return logp, old_logp
        (index,) = upload([fresh.nonzero()[:, 0].numpy()], logp.device)
        return logp[index], old_logp[index]


@dataclass(frozen=True)
class _Read:
    """Host numbers of an update.

    Attributes:
        bad_rows: rows of the micro-batches whose loss is not finite.
        norm: gradient norm.
        metrics: sums, and means over the scored tokens.
    """

    bad_rows: list[int]
    norm: float
    metrics: Metrics


class Trainer:
    """Holds the model, the optimizer and the weight version.

    `version` increases by one with every update made; rollouts are stamped with it. `steps` counts
    attempted updates; the learning rate follows it.

    Args:
        model: model to train.
        config: trainer settings.
        scoring: temperature, chunk size and precision of the forward pass.
        total_steps: length of the learning-rate schedule, in updates.
        epochs: passes over each batch.
        score: scores (with gradient) and entropies of a packed row's scored tokens.
        frozen: log-probs [S] of the same tokens under another model, used as `ref_logp`. None if
            they are already filled in or not needed.
        mismatch_limit: largest mean log-prob difference to the engine on fresh tokens, in nats,
            with which an update is made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        scoring: Scoring,
        total_steps: int,
        *,
        epochs: int = 1,
        score: Score = score_row,
        frozen: Callable[[PackedRow], Tensor] | None = None,
        mismatch_limit: float = math.inf,
    ) -> None:
        self.model = model
        self.config = config
        self.scoring = scoring
        self.total_steps = total_steps
        self.epochs = epochs
        self.score = score
        self.frozen = frozen
        self.mismatch_limit = mismatch_limit
        apply_activation_checkpointing(model, config.activation_checkpointing)
        self.optimizer = make_optimizer(model, config)
        self.version = 0
        self.steps = 0
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self.skip_reason = ""

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state for a checkpoint. The model's weights are saved with the model."""
        return optimizer_tensors(self.optimizer, self.model)

    def state(self) -> dict[str, int]:
        """Counters for a checkpoint."""
        return {
            "version": self.version,
            "steps": self.steps,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore optimizer state and counters.

        Raises:
            UserError: if they are another model's. Nothing has been changed then.
        """
        check_names(self.state(), state, "value")
        load_optimizer_tensors(self.optimizer, self.model, tensors)
        self.version, self.steps = state["version"], state["steps"]
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Make all updates of one step on the batch.

        Returns:
            Metrics of the step. `train/skipped` counts updates that were not made; `skip_reason`
            says why.

        Raises:
            ValueError: if batch.weights is None, or if the mask contradicts the versions of tokens.
            TrainingDiverged: after `max_skipped_steps` consecutive skips for non-finite values.
            EngineDisagrees: if engine and trainer disagree by more than the limit.
        """
        if batch.weights is None:
            raise ValueError("batch.weights is not filled in: compute advantages first")
        weighs, batch = batch.weights.any(-1).tolist(), batch.with_host()
        check_mask(batch)
        updates = (
            _minibatches(batch, [b for b, any_weight in enumerate(weighs) if any_weight])
            * self.epochs
        )
        if not updates:
            self.skip_reason = (
                "every advantage is zero, for example because the rewards of each group are equal"
            )
            return {
                "train/skipped": 1.0,
                "train/skipped_total": float(self.skipped_total),
                "train/learning_rate": learning_rate(self.config, self.steps, self.total_steps),
                "train/updates": 0.0,
                "train/tokens": 0.0,
                "train/microbatches": 0.0,
            }
        made, reasons = [], []
        for rows in updates:
            made.append(self._update(batch, rows, loss))
            reasons += [self.skip_reason] * bool(self.skip_reason)
        self.skip_reason = reasons[0] if reasons else ""
        return merge_updates(made)

    def _update(self, batch: Batch, rows: Sequence[int], loss: Loss) -> Metrics:
        """One update on the given rows of the batch."""
        rate = learning_rate(self.config, self.steps, self.total_steps)
        parts = microbatches(
            batch, rows, self.config.max_tokens_per_microbatch, self.config.share_prefix
        )
        totals = self._accumulate(batch, parts, loss)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )
        read = totals.read(norm)
        mismatch = mismatch_metrics(*totals.fresh_logp())
        self._check_mismatch(mismatch)
        skipped = self._step(norm, read, rate)
        metrics: Metrics = dict(read.metrics)
        metrics |= log_ratio_metrics(torch.cat(totals.logp), torch.cat(totals.old_logp)) | mismatch
        metrics |= {
            "train/grad_norm": read.norm,
            "train/learning_rate": rate,
            "train/updates": float(not skipped),
            "train/tokens": float(totals.computed),
            "train/microbatches": float(len(parts)),
            "train/skipped": float(skipped),
            "train/skipped_total": float(self.skipped_total),
        }
        return metrics

    def _accumulate(self, batch: Batch, parts: Sequence[Sequence[int]], loss: Loss) -> _Totals:
        """Forward and backward every micro-batch.

        Gradients add up in float32 on the master weights.
        """
        totals, host = _Totals(), batch.at_host()
        for rows in parts:
            packed = pack(batch, rows, self.config.share_prefix)
            local, logp = self._forward(batch, packed)
            output = loss(local, logp)
            # Run backward even if the loss is not finite: checking here would wait for the device.
            # In that case the update is skipped later and the gradient dropped.
            output.loss.backward()
            self._count(totals, local, packed, logp, output)
            totals.rows.append(rows)
            totals.fresh.append((host.version[rows] == self.version)[host.mask[rows]])
        return totals

    def _forward(self, batch: Batch, packed: PackedRow) -> tuple[Batch, Tensor]:
        """The micro-batch's rows with entropies filled in, and their log-probs [rows, T]."""
        local, at = batch.rows(packed.members), (packed.slot, packed.column)
        grid = torch.zeros(local.tokens.shape, device=batch.tokens.device)
        # Before the policy's forward pass: otherwise its activations would be held meanwhile.
        if self.frozen is not None:
            local = local.with_(ref_logp=grid.index_put(at, self.frozen(packed)))
        scored_logp, scored_entropy = self.score(self.model, packed, self.scoring)
        return local.with_(entropy=grid.index_put(at, scored_entropy)), grid.index_put(
            at, scored_logp
        )

    def _count(
        self, totals: _Totals, local: Batch, packed: PackedRow, logp: Tensor, output: LossOutput
    ) -> None:
        at = packed.slot, packed.column
        totals.computed += len(packed.tokens)
        totals.losses.append(output.loss.detach())
        for name, value in output.sums.items():
            totals.sums.setdefault(name, []).append(value)
        for name, table in {
            **output.means,
            "train/entropy": filled(local.entropy, "entropy"),
        }.items():
            totals.means.setdefault(name, []).append(table.detach()[at].sum())
        totals.logp.append(logp.detach()[at])
        totals.old_logp.append(local.old_logp[at])

    def _check_mismatch(self, mismatch: Metrics) -> None:
        """Raise EngineDisagrees above the limit, and drop the gradient.

        Values that are not finite are left to `_step`, which skips the update.
        """
        mean = mismatch.get("mismatch/mean_abs_logp")
        if isinstance(mean, float) and self.mismatch_limit < mean < math.inf:
            self.optimizer.zero_grad(set_to_none=True)
            raise EngineDisagrees(
                "engine and trainer disagree on tokens sampled from the current weights: mean"
                f" difference {mean:.2g} nats (limit {self.mismatch_limit:g}). The ratios would be"
                " noise, so no update was made. Set run.precision = 'float32' or"
                " SIXFOLD_KERNELS=torch; if neither helps, this model cannot be trained"
            )

    def _step(self, norm: Tensor, read: _Read, rate: float) -> bool:
        """Update the weights if loss and gradient are finite.

        Returns True if the update was skipped.
        """
        self.steps += 1
        self.skip_reason = ""
        if read.bad_rows:
            self.skip_reason = f"loss not finite in rows {read.bad_rows[:8]}"
        elif not math.isfinite(read.norm):
            names = [
                n
                for n, p in self.model.named_parameters()
                if p.grad is not None and not bool(p.grad.isfinite().all())
            ]
            self.skip_reason = f"gradient not finite in {len(names)} tensors, first {names[:1]}"
        if not self.skip_reason:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            # Clip only after the check: a non-finite norm would spread to every gradient, and the
            # reason above would then name all of them.
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.config.grad_clip, norm
            )
            self.optimizer.step()
            self.version += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.skip_reason else 0
        self.skipped_total += bool(self.skip_reason)
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} steps in a row skipped: {self.skip_reason}. Lower"
                " trainer.learning_rate, or raise trainer.max_skipped_steps"
            )
        return bool(self.skip_reason)


SUMMED = frozenset({"train/updates", "train/tokens", "train/microbatches", "train/skipped"})
LAST = frozenset({"train/learning_rate", "train/skipped_total"})


def merge_updates(made: Sequence[Metrics]) -> Metrics:
    """Metrics of a step from the metrics of its updates.

    Counts and histograms are added. The learning rate and the running total are those of the last
    update. All other metrics are averaged.
    """
    merged: Metrics = {}
    for key in {k: None for metrics in made for k in metrics}:
        values = [metrics[key] for metrics in made if key in metrics]
        numbers = [v for v in values if isinstance(v, float)]
        if not numbers:
            merged[key] = [
                sum(column)
                for column in zip(*(v for v in values if isinstance(v, list)), strict=True)
            ]
        elif key in LAST:
            merged[key] = numbers[-1]
        else:
            merged[key] = sum(numbers) / (1 if key in SUMMED else len(numbers))
    return merged


def _minibatches(batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    """Rows of each update of one pass, in mini-batch order. Empty mini-batches are omitted."""
    if batch.minibatch is None:
        return [list(rows)] if rows else []
    number = batch.minibatch.tolist()
    return [[b for b in rows if number[b] == m] for m in sorted({number[b] for b in rows})]
