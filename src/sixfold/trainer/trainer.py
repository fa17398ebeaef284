"""One forward, one backward, one update, for any loss it is handed. The only place where backward runs.

The trainer knows no algorithm: a loss takes rows of the batch and their scores (a policy's log-probs, a critic's values). It computes only the rows
that weigh something, packed, a micro-batch at a time; because weights are fixed for the whole step, the gradient does not depend on the split.

    step      what the loop calls: `epochs` passes over a batch, each of one update per mini-batch (`batch.minibatch`; one where it is not set)
    update    what AdamW does once; the weight version counts these
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, Loss, LossOutput, Metrics, filled, upload
from ..recipe.schema import TrainerConfig
from .checkpointing import apply_activation_checkpointing
from .logprobs import Score, Scoring, score_row
from .mismatch import log_ratio_metrics, mismatch_metrics
from .optimizer import learning_rate, make_optimizer
from .packing import PackedRow, microbatches, pack


class TrainingDiverged(RuntimeError):
    """Several steps in a row had no finite gradient."""


class EngineDisagrees(TrainingDiverged):
    """The engine's log-probs are so far from the trainer's that ratios are noise. The update was not made."""


@dataclass
class _Totals:
    """What the micro-batches of an update add up to. Numbers stay on the device until the last micro-batch; then the host waits for all at once.

    rows: of each micro-batch. losses: of each micro-batch. sums, means: by name, a number from each micro-batch. fresh: [tokens] boolean on the
    host, sampled from the current weights.
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
        """Everything as Python numbers, in one copy from the device."""
        named = [(kind, name, len(values)) for kind in (self.sums, self.means) for name, values in kind.items()]
        columns = [*self.losses, *(value for kind, name, _ in named for value in kind[name]), norm]
        numbers = torch.stack([x.detach().double() for x in columns]).tolist()
        bad_rows = [b for loss, rows in zip(numbers, self.rows, strict=False) if not math.isfinite(loss) for b in rows]
        at, sums, means = len(self.losses), dict[str, float](), dict[str, float]()
        for kind, name, count in named:
            (sums if kind is self.sums else means)[name] = sum(numbers[at : at + count])
            at += count
        tokens = max(sum(map(len, self.logp)), 1)
        return _Read(bad_rows, numbers[-1], {**sums, **{name: total / tokens for name, total in means.items()}})

    def fresh_logp(self) -> tuple[Tensor, Tensor]:
        """Log-probs and log-probs at sampling of the fresh tokens, [F] each."""
        logp, old_logp, fresh = torch.cat(self.logp), torch.cat(self.old_logp), torch.cat(self.fresh)
        if bool(fresh.all()):
            return logp, old_logp
        (index,) = upload([fresh.nonzero()[:, 0].numpy()], logp.device)
        return logp[index], old_logp[index]


@dataclass(frozen=True)
class _Read:
    """bad_rows: of the micro-batches whose loss is not finite. norm: of the gradient. metrics: sums, and means over the scored tokens."""

    bad_rows: list[int]
    norm: float
    metrics: Metrics


class Trainer:
    """Holds the model, the optimizer and the weight version.

    version: grows by one with every update made; what rollouts are stamped with. steps: updates attempted, which the learning rate follows.
    total_steps: of the schedule, in updates. scoring: temperature, chunk and precision of the forward. epochs: passes over each batch. score: what
    the model says of a packed row's scored tokens, with gradient, and their entropies. frozen: another model's log-probs [S] of the same, which
    become the rows' `ref_logp`; None where they are filled in already, or nobody asks for them. mismatch_limit: largest mean disagreement with the
    engine on fresh tokens, in nats, with which an update is made.
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

    def counters(self) -> dict[str, int]:
        """What it counts, as JSON."""
        counts = {"version": self.version, "steps": self.steps}
        return counts | {"skipped_total": self.skipped_total, "skipped_in_a_row": self.skipped_in_a_row}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take over what `counters` gave; counts of others are ignored."""
        self.version, self.steps = counters["version"], counters["steps"]
        self.skipped_total, self.skipped_in_a_row = counters["skipped_total"], counters["skipped_in_a_row"]

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Every update that the batch is good for. Gives the step's metrics; `train/skipped` counts updates that were not made (`skip_reason` why).

        Raises TrainingDiverged after `max_skipped_steps` skips in a row for non-finite gradients, or if engine and trainer disagree.
        """
        if batch.weights is None:
            raise ValueError("batch.weights is not filled in: compute advantages first")
        weighs, batch = batch.weights.any(-1).tolist(), batch.with_host()
        updates = _minibatches(batch, [b for b, any_weight in enumerate(weighs) if any_weight]) * self.epochs
        if not updates:
            self.skip_reason = "no trajectory carries a signal: every advantage is zero, as where all rewards are equal"
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
        """One update on some rows of the batch."""
        rate = learning_rate(self.config, self.steps, self.total_steps)
        parts = microbatches(batch, rows, self.config.max_tokens_per_microbatch, self.config.share_prefix)
        totals = self._accumulate(batch, parts, loss)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
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
        """Forward and backward every micro-batch; gradients add up in float32 on the master weights."""
        totals, host = _Totals(), batch.at_host()
        for rows in parts:
            packed = pack(batch, rows, self.config.share_prefix)
            local, logp = self._forward(batch, packed)
            output = loss(local, logp)
            # Even if it is not finite: to look would be to wait for the device. The update is then left out, and the gradient dropped.
            output.loss.backward()
            self._count(totals, local, packed, logp, output)
            totals.rows.append(rows)
            totals.fresh.append((host.version[rows] == self.version)[host.mask[rows]])
        return totals

    def _forward(self, batch: Batch, packed: PackedRow) -> tuple[Batch, Tensor]:
        """The rows as a batch of their own with their entropies filled in, and their log-probs [rows, T]."""
        local, at = batch.rows(packed.members), (packed.slot, packed.column)
        grid = torch.zeros(local.tokens.shape, device=batch.tokens.device)
        if self.frozen is not None:  # before the policy's forward, whose activations would be kept alive meanwhile
            local = local.with_(ref_logp=grid.index_put(at, self.frozen(packed)))
        scored_logp, scored_entropy = self.score(self.model, packed, self.scoring)
        return local.with_(entropy=grid.index_put(at, scored_entropy)), grid.index_put(at, scored_logp)

    def _count(self, totals: _Totals, local: Batch, packed: PackedRow, logp: Tensor, output: LossOutput) -> None:
        at = packed.slot, packed.column
        totals.computed += len(packed.tokens)
        totals.losses.append(output.loss.detach())
        for name, value in output.sums.items():
            totals.sums.setdefault(name, []).append(value)
        for name, table in {**output.means, "train/entropy": filled(local.entropy, "entropy")}.items():
            totals.means.setdefault(name, []).append(table.detach()[at].sum())
        totals.logp.append(logp.detach()[at])
        totals.old_logp.append(local.old_logp[at])

    def _check_mismatch(self, mismatch: Metrics) -> None:
        """Raise EngineDisagrees beyond the limit, and drop the gradient. What is not finite is left to `_step`, which skips it."""
        mean = mismatch.get("mismatch/mean_abs_logp")
        if isinstance(mean, float) and self.mismatch_limit < mean < math.inf:
            self.optimizer.zero_grad(set_to_none=True)
            raise EngineDisagrees(
                f"engine and trainer disagree by {mean:.2g} nats in the mean on tokens that the current weights sampled (limit "
                f"{self.mismatch_limit:g}): ratios between them are noise, and no update was made. Try SIXFOLD_KERNELS=torch or "
                'run.precision = "float32"; if it stays, this model is not computed right here'
            )

    def _step(self, norm: Tensor, read: _Read, rate: float) -> bool:
        """Update the weights unless something was not finite; True when skipped."""
        self.steps += 1
        self.skip_reason = ""
        if read.bad_rows:
            self.skip_reason = f"loss not finite in rows {read.bad_rows[:8]}"
        elif not math.isfinite(read.norm):
            names = [n for n, p in self.model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
            self.skip_reason = f"gradient not finite in {len(names)} tensors, first {names[:1]}"
        if not self.skip_reason:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            # Only now: clipping by a norm that is not finite would spread it to every gradient, and the reason above would name them all.
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.grad_clip, norm)
            self.optimizer.step()
            self.version += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.skip_reason else 0
        self.skipped_total += bool(self.skip_reason)
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} steps in a row skipped: {self.skip_reason}. Lower trainer.learning_rate, or raise trainer.max_skipped_steps"
            )
        return bool(self.skip_reason)


SUMMED = frozenset({"train/updates", "train/tokens", "train/microbatches", "train/skipped"})
LAST = frozenset({"train/learning_rate", "train/skipped_total"})


def merge_updates(made: Sequence[Metrics]) -> Metrics:
    """A step's metrics from those of its updates: counts and histograms added, the learning rate and the running total of the last, else means."""
    merged: Metrics = {}
    for key in {k: None for metrics in made for k in metrics}:
        values = [metrics[key] for metrics in made if key in metrics]
        numbers = [v for v in values if isinstance(v, float)]
        if not numbers:
            merged[key] = [sum(column) for column in zip(*(v for v in values if isinstance(v, list)), strict=True)]
        elif key in LAST:
            merged[key] = numbers[-1]
        else:
            merged[key] = sum(numbers) / (1 if key in SUMMED else len(numbers))
    return merged


def _minibatches(batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    """The rows of each update of a pass, in the mini-batches' order; those without a row are left out."""
    if batch.minibatch is None:
        return [list(rows)] if rows else []
    number = batch.minibatch.tolist()
    return [[b for b in rows if number[b] == m] for m in sorted({number[b] for b in rows})]
