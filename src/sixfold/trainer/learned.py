"""Metrics of the updates of a step.

A loss owns its metrics: it names each of them, and the trainer only adds or averages them. The
trainer owns the rest: the numbers of an update in `Learned`, and those of a policy's log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batch import LossOutput, Metrics, upload
from ..ranks import ALONE, Ranks
from .logprobs import RoutedScores, Scores
from .mismatch import log_ratio_metrics, mismatch_metrics, temperature_metrics
from .routing import Routed, router_metrics
from .spikes import RowGradients


@dataclass(frozen=True)
class Learned:
    """Report of one update, or of all updates of a step.

    Attributes:
        metrics: metrics of the loss, and of the log-probs if the scores are log-probs.
        learning_rate: rate of the last update.
        grad_norm: norm before clipping, averaged over updates. None if there was no update to make.
        tokens: tokens computed.
        microbatches: backward passes.
        skipped: updates that were not made.
        skipped_total: the same since the start of the run, after the last update.
    """

    metrics: Metrics
    learning_rate: float
    grad_norm: float | None
    updates: int
    tokens: int
    microbatches: int
    skipped: int
    skipped_total: int

    def policy_metrics(self) -> Metrics:
        norm: Metrics = {} if self.grad_norm is None else {"train/grad_norm": self.grad_norm}
        counts = ("updates", "tokens", "microbatches", "skipped", "skipped_total")
        return {
            **self.metrics,
            **norm,
            "train/learning_rate": self.learning_rate,
            **{f"train/{name}": float(getattr(self, name)) for name in counts},
        }


def merge_updates(made: Sequence[Learned]) -> Learned:
    """Report of a step from the reports of its updates: at least one."""
    norms = [update.grad_norm for update in made if update.grad_norm is not None]
    return Learned(
        metrics=_merge_metrics([update.metrics for update in made]),
        learning_rate=made[-1].learning_rate,
        grad_norm=sum(norms) / len(norms) if norms else None,
        updates=sum(update.updates for update in made),
        tokens=sum(update.tokens for update in made),
        microbatches=sum(update.microbatches for update in made),
        skipped=sum(update.skipped for update in made),
        skipped_total=made[-1].skipped_total,
    )


def _merge_metrics(made: Sequence[Metrics]) -> Metrics:
    """Numbers averaged over the updates that have them, histograms added."""
    merged: Metrics = {}
    for key in {k: None for metrics in made for k in metrics}:
        values = [metrics[key] for metrics in made if key in metrics]
        numbers = [v for v in values if isinstance(v, float)]
        lists = [v for v in values if isinstance(v, list)]
        merged[key] = (
            sum(numbers) / len(numbers)
            if numbers
            else [sum(column) for column in zip(*lists, strict=True)]
        )
    return merged


@dataclass(frozen=True)
class Read:
    """Host numbers of an update, over all ranks.

    Attributes:
        bad_rows: rows of the micro-batches whose loss is not finite.
        metrics: sums, and means over the scored tokens.
        tokens: tokens computed.
        microbatches: micro-batches with rows.
    """

    bad_rows: list[int]
    norm: float
    metrics: Metrics
    tokens: int
    microbatches: int


@dataclass(frozen=True)
class _Counts:
    """Numbers of one rank, to be added over ranks. Fields are those of `Read`, except:

    Attributes:
        sums: metrics that are summed.
        means: sums of the metrics that are averaged over scored tokens.
        scored: number of scored tokens.
    """

    bad_rows: list[int]
    sums: dict[str, float]
    means: dict[str, float]
    scored: int
    tokens: int
    microbatches: int


@dataclass
class UpdateTotals:
    """Sums over the micro-batches of an update.

    Numbers stay on the device until the last micro-batch, so the host synchronises once.

    Attributes:
        tokens: tokens computed.
        losses: loss of each micro-batch.
        sums: by metric name, one number per micro-batch, to be added.
        means: by metric name, one number per micro-batch, to be averaged over scored tokens.
        scores: scores of each micro-batch, without gradient.
        old_logp: log-probs at sampling of the scored tokens of each micro-batch.
        entropies: entropy of the policy at the scored tokens of each micro-batch.
        versions: on the host, the weight version that sampled them. -1: not sampled by a policy.
        routed: report of the routers in each micro-batch of a mixture of experts.
        gradients: derivatives of the loss with respect to the scores.
    """

    tokens: int = 0
    rows: list[Sequence[int]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    means: dict[str, list[Tensor]] = field(default_factory=dict)
    scores: list[Tensor] = field(default_factory=list)
    old_logp: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    gradients: RowGradients = field(default_factory=RowGradients)

    def add(
        self,
        scores: Scores | RoutedScores,
        output: LossOutput,
        at: tuple[Tensor, Tensor],
        old_logp: Tensor,
    ) -> None:
        """Add a micro-batch.

        Args:
            at: (row, column) of every scored token in its [B, T] tables.
            old_logp: [B, T].
        """
        self.losses.append(output.loss.detach())
        for name, value in output.sums.items():
            self.sums.setdefault(name, []).append(value)
        for name, table in output.means.items():
            self.means.setdefault(name, []).append(table.detach()[at].sum())
        if scores.entropy is not None:
            self.entropies.append(scores.entropy.detach())
            self.means.setdefault("train/entropy", []).append(self.entropies[-1].sum())
            self.old_logp.append(old_logp[at])
        self.scores.append(scores.values.detach())
        if isinstance(scores, RoutedScores):
            self.routed.append(scores.routed)

    def read(self, norm: Tensor, ranks: Ranks = ALONE) -> Read:
        """Read everything as Python numbers, in one copy from the device.

        Args:
            norm: gradient norm, equal on all ranks.
        """
        named = [
            (kind, name, len(values))
            for kind in (self.sums, self.means)
            for name, values in kind.items()
        ]
        routers = router_metrics(_routed_everywhere(self.routed, ranks))
        values = [value for kind, name, _ in named for value in kind[name]]
        columns = [*self.losses, *values, *routers.values(), norm]
        numbers = torch.stack([x.detach().to(norm.device, torch.double) for x in columns]).tolist()
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
        scored = sum(map(len, self.scores))
        counts = _Counts(bad_rows, sums, means, scored, self.tokens, len(self.rows))
        found = dict(zip(routers, numbers[at:-1], strict=True))
        return _over_ranks(ranks.gather(counts), numbers[-1], found)

    def sampler_metrics(self, version: int, ranks: Ranks = ALONE) -> Metrics:
        """Metrics that compare log-probs with those at sampling.

        Empty if the scores are not log-probs, or if no policy sampled the tokens (as in SFT).

        Args:
            version: current weight version. Tokens that it sampled are fresh.
        """
        found = self.scores, self.old_logp, self.entropies
        columns = [torch.cat(x) if x else torch.zeros(0) for x in found]
        columns += [torch.cat(self.versions) if self.versions else torch.zeros(0).long()]
        if ranks.size > 1:
            of_ranks = ranks.gather([column.cpu() for column in columns])
            columns = [torch.cat(column) for column in zip(*of_ranks, strict=True)]
        logp, old_logp, entropy, versions = columns
        if not len(old_logp) or not bool((versions >= 0).any()):
            return {}
        fresh = _select(versions == version, logp, old_logp, entropy)
        mismatch = mismatch_metrics(*fresh[:2]) | temperature_metrics(*fresh)
        return log_ratio_metrics(logp, old_logp) | mismatch


def _over_ranks(counts: Sequence[_Counts], norm: float, routers: Metrics) -> Read:
    """Add the numbers of all ranks."""
    sums, means = dict[str, float](), dict[str, float]()
    for count in counts:
        for total, own in ((sums, count.sums), (means, count.means)):
            for name, value in own.items():
                total[name] = total[name] + value if name in total else value
    scored = max(sum(count.scored for count in counts), 1)
    return Read(
        [b for count in counts for b in count.bad_rows],
        norm,
        {**sums, **{name: total / scored for name, total in means.items()}, **routers},
        sum(count.tokens for count in counts),
        sum(count.microbatches for count in counts),
    )


def _routed_everywhere(routed: list[Routed], ranks: Ranks) -> list[Routed]:
    """Reports of the routers in the micro-batches of all ranks."""
    if ranks.size == 1:
        return routed
    # Without the penalty: a tensor with a gradient cannot be sent.
    kept = [[None if x is None else x.cpu() for x in r._replace(penalty=None)] for r in routed]
    return [
        Routed(*each)  # type: ignore[arg-type]
        for of_rank in ranks.gather(kept)
        for each in of_rank
    ]


def _select(which: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Entries [F] of columns [S] where `which` [S], a tensor on the host, is True."""
    if bool(which.all()):
        return columns
    (index,) = upload([which.nonzero()[:, 0].numpy()], columns[0].device)
    return tuple(column[index] for column in columns)
