"""Forward, backward and update for any loss. The only place where backward runs.

The trainer does not depend on the algorithm: a loss takes rows of the batch and their scores (a
policy's log-probs or a critic's values). Only units with nonzero weights are computed. They are
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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..batch import Batch, Loss, Metrics, check_mask
from ..checkpointable import check_names
from ..errors import size_noted
from ..ranks import ALONE, Ranks
from ..recipe.schema import TrainerConfig
from .checkpointing import apply_activation_checkpointing
from .learned import Learned, Read, UpdateTotals, merge_updates
from .logprobs import Root, RoutedScores, Scores, Scoring
from .optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer, not_finite
from .optimizer_state import load_optimizer_tensors, optimizer_tensors
from .packing import PackedRow, filler, pack
from .sharing import plan_updates
from .spikes import NormLevel, named_rows


class TrainingDiverged(RuntimeError):
    """Weights are not finite, or several steps in a row had no finite loss or gradient."""


class EngineDisagrees(TrainingDiverged):
    """Engine and trainer log-probs differ so much that ratios are noise. No update was made."""


class Trainer:
    """Holds the model, the optimizer and the weight version.

    `version` increases by one with every update made; rollouts are stamped with it. `steps` counts
    attempted updates; the learning rate follows it.

    Args:
        root: model to train. Its forward pass gives the scores that losses read.
        scoring: temperature, chunk size and precision of the forward pass.
        total_steps: length of the learning-rate schedule, in updates.
        epochs: passes over each batch.
        frozen: log-probs [S] of the same tokens under another model, used as `ref_logp`. None if
            they are already filled in or not needed.
        mismatch_limit: largest mean log-prob difference to the engine on fresh tokens, in nats,
            with which an update is made.
        ranks: the ranks that train the model together. With several, it is sharded.
    """

    def __init__(
        self,
        root: Root,
        config: TrainerConfig,
        scoring: Scoring,
        total_steps: int,
        *,
        epochs: int = 1,
        frozen: Callable[[PackedRow], Tensor] | None = None,
        mismatch_limit: float = math.inf,
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        self.root = root
        self.config = config
        sharded = any(isinstance(p, DTensor) for p in root.model.parameters())
        self.scoring = replace(scoring, direct=ranks.size == 1 and not sharded)
        self.total_steps = total_steps
        self.epochs = epochs
        self.frozen = frozen
        self.mismatch_limit = mismatch_limit
        self.ranks = ranks
        apply_activation_checkpointing(self.model, config.activation_checkpointing)
        self.optimizer = make_optimizer(self.model, config, seed)
        self.version = 0
        self.steps = 0
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self.skip_reason = ""
        self.level = NormLevel()
        self.spikes: list[str] = []

    @property
    def model(self) -> nn.Module:
        return self.root.model

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state for a checkpoint. The model's weights are saved with the model."""
        return optimizer_tensors(self.optimizer, self.model)

    def state(self) -> dict[str, Any]:
        """Counters, and the running level of the gradient norm, for a checkpoint."""
        return {
            "version": self.version,
            "steps": self.steps,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
            "gradient_norm": self.level.state(),
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        check_names(self.state(), state, "value")
        load_optimizer_tensors(self.optimizer, self.model, tensors)
        self.version, self.steps = state["version"], state["steps"]
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.level.load(state["gradient_norm"])

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Make all updates of one step on the batch.

        Returns:
            Metrics of the step. `train/skipped` counts updates that were not made; `skip_reason`
            says why. `spikes` has one line per update with a gradient spike.

        Raises:
            ValueError: if batch.weights is None, if the mask contradicts the versions of tokens, or
                if a mini-batch splits a unit.
            TrainingDiverged: after `max_skipped_steps` consecutive skips for non-finite values.
            EngineDisagrees: if engine and trainer disagree by more than the limit.
        """
        return self.learn(batch, loss).policy_metrics()

    def learn(self, batch: Batch, loss: Loss) -> Learned:
        """As `train_step`, with a typed report."""
        if batch.weights is None:
            raise ValueError("batch.weights is not filled in: prepare the batch first")
        weighs = batch.weights.any(-1).long()
        number = torch.zeros_like(weighs) if batch.minibatch is None else batch.minibatch
        weighty, numbers = torch.stack([weighs, number]).tolist()  # one wait for the device
        batch, config, self.spikes = batch.with_host(), self.config, []
        check_mask(batch)
        budget = config.max_tokens_per_microbatch, config.share_prefix
        plan = plan_updates(batch, weighty, numbers, *budget, self.ranks)
        if not plan:
            self.skip_reason = (
                "every advantage is zero, for example because the rewards of each group are equal"
            )
            rate = learning_rate(config, self.steps, self.total_steps)
            return Learned({}, rate, None, 0, 0, 0, 1, self.skipped_total)
        made, reasons = [], []
        for parts in plan * self.epochs:
            made.append(self._update(batch, parts, loss))
            reasons += [self.skip_reason] * bool(self.skip_reason)
        self.skip_reason = reasons[0] if reasons else ""
        return merge_updates(made)

    def _update(self, batch: Batch, parts: Sequence[Sequence[int]], loss: Loss) -> Learned:
        rate = learning_rate(self.config, self.steps, self.total_steps)
        totals = self._accumulate(batch, parts, loss)
        norm = gradient_norm(self.model.parameters())
        read = totals.read(norm, self.ranks)
        sampler = totals.sampler_metrics(self.version, self.ranks)
        self._check_mismatch(sampler)
        skipped = self._step(norm, read, rate)
        if not skipped and (excess := self.level.observe(read.norm)):
            self._report(batch, totals, read.norm, excess)
        return Learned(
            metrics=read.metrics | sampler,
            learning_rate=rate,
            grad_norm=read.norm,
            updates=int(not skipped),
            tokens=read.tokens,
            microbatches=read.microbatches,
            skipped=int(skipped),
            skipped_total=self.skipped_total,
        )

    def _accumulate(self, batch: Batch, parts: Sequence[Sequence[int]], loss: Loss) -> UpdateTotals:
        """Forward and backward every micro-batch: one backward pass for each, whatever its values.

        Gradients add up in float32 on the master weights.
        """
        totals, share, width = UpdateTotals(), self.config.share_prefix, batch.tokens.shape[1]
        packs = [
            partial(pack, batch, rows, share) if rows else partial(filler, batch) for rows in parts
        ]
        self.root.prepare(packs, self.scoring, self.ranks)
        for rows in parts:
            with size_noted(f"micro-batch of {len(rows)} rows of at most {width} tokens"):
                part = self._loss(batch, rows, loss, totals) if rows else self._no_loss(batch)
                # Run backward even if the loss is not finite. Checking here would wait for the
                # device, and ranks that wait for each other's gradients must all run as many
                # backward passes. The update is then skipped later and the gradient dropped.
                part.backward()
        return totals

    def _loss(self, batch: Batch, rows: Sequence[int], loss: Loss, totals: UpdateTotals) -> Tensor:
        """Loss of one micro-batch, with gradient. Its numbers are added to the totals."""
        host, packed = batch.at_host(), pack(batch, rows, self.config.share_prefix)
        local, scores = self._forward(batch, packed)
        at = packed.slot, packed.column
        totals.gradients.watch(scores.values, packed.members, packed.slot)
        output = loss(local, _table(local, at, scores.values))
        totals.add(scores, output, at, local.old_logp)
        totals.tokens += len(packed.tokens)
        totals.rows.append(rows)
        totals.versions.append(host.version[rows][host.mask[rows]])
        return _with_penalty(output.loss, scores)

    def _no_loss(self, batch: Batch) -> Tensor:
        """Loss of an empty micro-batch: 0. Its backward pass adds zeros to every gradient."""
        packed = filler(batch)
        if self.frozen is not None:
            self.frozen(packed)
        return self.root(packed, self.scoring).values.sum() * 0.0

    def _forward(self, batch: Batch, packed: PackedRow) -> tuple[Batch, Scores | RoutedScores]:
        """The micro-batch's rows, with entropies filled in if there are any, and their scores."""
        local, at = batch.rows(packed.members), (packed.slot, packed.column)
        # Before the policy's forward pass: otherwise its activations would be held meanwhile.
        if self.frozen is not None:
            local = local.with_(ref_logp=_table(local, at, self.frozen(packed)))
        scores = self.root(packed, self.scoring)
        if scores.entropy is not None:
            local = local.with_(entropy=_table(local, at, scores.entropy))
        return local, scores

    def _report(self, batch: Batch, totals: UpdateTotals, norm: float, excess: str) -> None:
        """Add a line about a gradient spike, with the rows that contributed most."""
        sizes: dict[int, float] = {}
        for part in self.ranks.gather(totals.gradients.contributions(bool(totals.old_logp))):
            sizes |= part
        rows = named_rows(sizes, batch.names)
        clip = self.config.grad_clip
        clipped = f"clipped to trainer.grad_clip = {clip:g}" if norm > clip else "not clipped"
        self.spikes.append(
            f"gradient spike: the gradient norm of update {self.steps} is {norm:.3g}, {excess};"
            f" {clipped}. Largest contributions: {rows}"
        )

    def _check_mismatch(self, mismatch: Metrics) -> None:
        """Raise EngineDisagrees above the limit, and drop the gradient.

        Values that are not finite are left to `_step`, which skips the update.
        """
        mean = mismatch.get("mismatch/mean_abs_logp")
        if isinstance(mean, float) and self.mismatch_limit < mean < math.inf:
            self.optimizer.zero_grad(set_to_none=True)
            found = mismatch.get("mismatch/temperature")
            fits = (
                f" The engine's log-probs fit {found:.2g} times the trainer's temperature."
                if isinstance(found, float)
                else ""
            )
            raise EngineDisagrees(
                "engine and trainer disagree on tokens sampled from the current weights: mean"
                f" difference {mean:.2g} nats (limit {self.mismatch_limit:g}).{fits} The ratios"
                " would be noise, so no update was made. A custom engine must report log-probs at"
                " the sampling temperature. Otherwise set run.precision = 'float32' or"
                " SIXFOLD_KERNELS=torch; if neither helps, this model cannot be trained"
            )

    def _step(self, norm: Tensor, read: Read, rate: float) -> bool:
        """Update the weights if loss and gradient are finite.

        Returns True if the update was skipped.
        """
        self.steps += 1
        self.skip_reason = ""
        if read.bad_rows:
            self.skip_reason = f"loss not finite in rows {read.bad_rows[:8]}"
        elif not math.isfinite(read.norm):
            names = not_finite(self.model)
            self.skip_reason = f"gradient not finite in {len(names)} tensors, first {names[:1]}"
        if not self.skip_reason:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            # Clip only after the check: a non-finite norm would spread to every gradient, and the
            # reason above would then name all of them.
            clip_gradients(self.model.parameters(), self.config.grad_clip, norm)
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


def _with_penalty(loss: Tensor, scores: Scores | RoutedScores) -> Tensor:
    """The loss plus the balance loss of a mixture of experts, if there is one."""
    if isinstance(scores, Scores) or scores.routed.penalty is None:
        return loss
    return loss + scores.routed.penalty


def _table(rows: Batch, at: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    """[B, T, ...] table of the rows with values [S, ...] at (row, column), 0 elsewhere."""
    shape = *rows.tokens.shape, *values.shape[1:]
    return torch.zeros(shape, device=values.device).index_put(at, values)
