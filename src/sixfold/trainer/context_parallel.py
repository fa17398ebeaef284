"""Context parallelism: the ranks of a context group divide the positions of each packed row.

A rank computes embeddings, norms, projections, MLP and output head for its own positions alone. In
every attention layer the group gathers the keys and values of all positions. A rank then computes
its own queries against the keys that each of them sees. The backward pass sums the gradients of
keys and values over the group, and each rank keeps those of its positions. This is exact for any
row: shared prompts, completions of unequal lengths, windows and sinks.

Under grouped-query attention, keys and values are a small part of the activations. All the others
are divided by the size of the group.

The group then gathers the scores, so every rank of it computes the loss of the whole row. A rank's
gradient is that of its own positions, and FSDP sums gradients over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..batch import KeptSets, upload
from ..kernels.attention import AttentionLayer
from ..kernels.span_attention import Spans, span_attention
from ..model.experts import OWN
from .packing import PackedRow
from .segments import Segment
from .stacking import stack_rows, sum_rows

S = TypeVar("S", bound=tuple[Any, ...])

STRETCHES = (1, 2, 4, 8)
"""Numbers of stretches per rank to try. More stretches balance costs better, but a rank then reads
the keys of more segments."""
BALANCED = 1.05
"""Enough balance: the largest cost of a rank, as a multiple of the mean."""


def key_counts(segments: Sequence[Segment]) -> np.ndarray:
    """Number of keys that each query of a row sees, [N]. It is the cost of its attention.

    Args:
        segments: segments of the row, in row order. They tile it.
    """
    return np.concatenate([np.arange(s.prefix, s.keys) + 1 for s in segments])


def assign_positions(cost: np.ndarray, ranks: int) -> np.ndarray:
    """Assign the positions of a row to ranks, with nearly equal counts and costs.

    The row is cut into stretches of equal length. Every rank gets equally many. Stretches are
    assigned from the most to the least expensive, each to the rank with the least cost so far. For
    a single sequence and two stretches per rank, a rank gets an early and a late stretch.

    Args:
        cost: [N] cost of each position.
        ranks: number of ranks.

    Returns:
        [N] rank of each position. A rank has none if there are fewer positions than ranks.
    """
    found: list[tuple[float, np.ndarray]] = []
    for count in STRETCHES:
        owner = _deal_positions(cost, ranks, count)
        loads = np.bincount(owner, weights=cost, minlength=ranks)
        found.append((float(loads.max() / loads.mean()), owner))
        if found[-1][0] <= BALANCED:
            break
    return min(found, key=lambda each: each[0])[1]


def _deal_positions(cost: np.ndarray, ranks: int, count: int) -> np.ndarray:
    """Rank of each position [N], if every rank gets `count` stretches."""
    bounds = np.arange(ranks * count + 1) * len(cost) // (ranks * count)
    costs = np.diff(np.concatenate([[0], np.cumsum(cost)])[bounds])
    rank_of = np.zeros(len(costs), np.int64)
    loads, taken = [0] * ranks, [0] * ranks
    for stretch in np.argsort(-costs, kind="stable"):
        rank = min((r for r in range(ranks) if taken[r] < count), key=lambda r: loads[r])
        rank_of[stretch] = rank
        loads[rank] += int(costs[stretch])
        taken[rank] += 1
    return np.repeat(rank_of, np.diff(bounds))


class _Places:
    """Places of divided items in a tensor that stacks the items of all ranks.

    Every rank has `most` places, of which it may use fewer.

    Args:
        owner: [n] rank of each item.
        ranks: number of ranks.

    Attributes:
        most: places of a rank, at least 1.
        slots: [n] place of each item.
    """

    def __init__(self, owner: np.ndarray, ranks: int) -> None:
        counts = np.bincount(owner, minlength=ranks)
        order = np.argsort(owner, kind="stable")
        within = np.empty(len(owner), np.int64)
        within[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.most = max(1, int(counts.max()))
        self.slots = owner * self.most + within


class ContextGroup:
    """The context group of this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor over the group, without gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def divide(self, row: PackedRow) -> DividedRow:
        """Divide the positions of a row over the group. Every rank finds the same division.

        A rank without positions computes position 0 again, and nobody reads its result.
        """
        owner = assign_positions(key_counts(row.segments), self.ranks)
        places = _Places(owner, self.ranks)
        own, count = np.flatnonzero(owner == self.rank), int((owner == self.rank).sum())
        computed = own if count else np.zeros(1, np.int64)
        read_owner = owner[row.host_reads]
        read_places = _Places(read_owner, self.ranks)
        scored = np.flatnonzero(read_owner == self.rank)
        reads = places.slots[row.host_reads[scored]] - self.rank * places.most
        spans, keys = own_spans(row.segments, own) if count else ([(1, 1)], np.zeros(1, np.int64))
        offsets = np.zeros((2, len(spans) + 1), np.int64)
        offsets[:, 1:] = np.cumsum(np.array(spans).T, axis=1)
        sent = upload(
            [computed, reads, scored, read_places.slots, places.slots[keys], *offsets],
            row.tokens.device,
        )
        at, local_reads, chosen = sent[:3]
        part = replace(
            row,
            tokens=row.tokens[at],
            positions=row.positions[at],
            attention=GatheredAttention(
                Spans(tuple(spans), sent[5].int(), sent[6].int()), sent[4], self, count, places.most
            ),
            reads=local_reads,
            target=row.target[chosen],
            kept=_kept_sets(row.kept, scored, chosen),
            copies=row.copies[computed] if count else np.zeros(1, np.int64),
            experts=_experts(row.experts, at, count),
            segments=(),
            host_reads=reads,
        )
        return DividedRow(part, self, chosen, sent[3], read_places.most)


def _kept_sets(kept: KeptSets | None, scored: np.ndarray, at: Tensor) -> KeptSets | None:
    """Kept sets of the scores of this rank.

    Args:
        kept: those of the whole row. None: no score has one.
        scored: indices of the scores, on the host.
        at: the same on the device of the row.
    """
    if kept is None or not len(scored):
        return None
    known = None if kept.known is None else kept.known[torch.from_numpy(scored)]
    return replace(kept[at], known=known)


def _experts(experts: Tensor | None, at: Tensor, count: int) -> Tensor | None:
    """`PackedRow.experts` of this rank's positions. A rank without positions has no record."""
    if experts is None:
        return None
    return experts[at] if count else torch.full_like(experts[at], OWN)


def own_spans(
    segments: Sequence[Segment], own: np.ndarray
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Spans of attention of some positions of a row.

    Args:
        segments: segments of the row, in row order. They tile it.
        own: the positions, ascending. At least one.

    Returns:
        (queries, keys) of each run of neighbouring positions in one segment, and the positions of
        all these keys, span after span.
    """
    spans, keys = list[tuple[int, int]](), list[np.ndarray]()
    for s in segments:
        first, last = np.searchsorted(own, (s.start, s.stop))
        if first == last:
            continue
        inside = own[first:last]
        cuts = [0, *(np.flatnonzero(np.diff(inside) > 1) + 1), len(inside)]
        for a, b in pairwise(cuts):
            stop = int(inside[b - 1]) + 1
            spans.append((b - a, s.prefix + stop - s.start))
            keys += [np.arange(s.prefix_start, s.prefix_stop), np.arange(s.start, stop)]
    return spans, np.concatenate(keys)


@dataclass(frozen=True)
class DividedRow:
    """The positions of one rank of a context group.

    Attributes:
        part: row with this rank's tokens and scores. It has no segments. Its `row`, `column`,
            `slot` and `members` are those of the whole row.
        scored: indices of this rank's scores among the S scores of the row.
        slots: [S] place of each score in the stacked scores of all ranks.
        most: places of a rank.
    """

    part: PackedRow
    group: ContextGroup
    scored: Tensor
    slots: Tensor
    most: int

    def complete(self, scores: S) -> S:
        """Scores of the whole row from those of this rank, with gradient.

        Args:
            scores: `Scores` or `RoutedScores`.
        """
        made: Any = scores
        entropy = None if made.entropy is None else self._gather(made.entropy)
        whole: S = made._replace(values=self._gather(made.values), entropy=entropy)
        return whole

    def _gather(self, values: Tensor) -> Tensor:
        gathered: Tensor = _GatherScores.apply(values, self)
        return gathered


class _GatherScores(torch.autograd.Function):
    """Scores of this rank -> scores of the row [S].

    Every rank computes the whole loss, so the gradient of its own scores is complete.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, divided: DividedRow) -> Tensor:
        ctx.divided = divided
        return stack_rows(values, divided.most, divided.group.group).index_select(0, divided.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.divided.scored), None


@dataclass(frozen=True)
class GatheredAttention:
    """Attention of this rank's queries with the keys and values of the whole group.

    Attributes:
        spans: this rank's queries, and the keys that they see.
        keys: place of each of these keys in the stacked keys of all ranks.
        count: positions of this rank whose keys the group needs. 0 for a rank without positions.
        most: places of a rank.
    """

    spans: Spans
    keys: Tensor
    group: ContextGroup
    count: int
    most: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Attention with q [1, H, n, D] and keys [1, KV heads, n, D]; returns [1, n, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        device = q.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else v.dtype
        k, v = _GatherKeys.apply(k, v, dtype, self)
        return span_attention(
            q, k, v, self.spans, kernel.scale, kernel.window, kernel.softcap, kernel.sinks
        )[None]


class _GatherKeys(torch.autograd.Function):
    """Keys and values of this rank -> those that its queries see, in the dtype of attention.

    The gradient of a key is a sum over queries of all ranks. It is added in float32 and rounded
    once.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, dtype: torch.dtype, plan: GatheredAttention
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.dtypes, ctx.rows, ctx.width = plan, (k.dtype, v.dtype), len(k), k.shape[-1]
        both = torch.cat([k.to(dtype), v.to(dtype)], dim=-1)[: plan.count]
        every = stack_rows(both, plan.most, plan.group.group)
        size = k.shape[-1]
        return (
            every[..., :size].index_select(0, plan.keys),
            every[..., size:].index_select(0, plan.keys),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        plan, group = ctx.plan, ctx.plan.group
        exact = torch.promote_types(grads[0].dtype, torch.float32)
        both = torch.cat([grad.to(exact) for grad in grads], dim=-1)
        every = both.new_zeros(group.ranks * plan.most, *both.shape[1:])
        every.index_add_(0, plan.keys, both)
        # A rank without positions has a row that no query sees: its gradient is 0.
        own = both.new_zeros(ctx.rows, *both.shape[1:])
        own[: plan.count] = sum_rows(every, plan.most, group.group)[: plan.count]
        k, v = own[..., : ctx.width], own[..., ctx.width :]
        return k.to(ctx.dtypes[0]), v.to(ctx.dtypes[1]), None, None
