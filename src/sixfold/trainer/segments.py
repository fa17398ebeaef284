"""Attention of a packed row, planned once and run in every layer.

A segment is a span of queries that attends to a prefix span (possibly empty) and, causally, to
itself.

On a CPU (`AttentionPlan`) each long segment is one call. Short segments cost more in call overhead
than in arithmetic, so they are gathered into padded buckets. Padding is masked, so the numbers
equal those of single calls.

On a GPU (`SpanPlan`) all segments are one call. The keys of a segment are its prefix and itself,
aligned at their ends, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..batch import upload
from ..kernels.attention import AttentionLayer, causal_attention, masked_attention
from ..kernels.span_attention import Spans, span_attention

SHORT = 256 * 256
"""Segments with fewer scores (queries x keys) than this are gathered into buckets."""
WASTE = 1.5
"""A bucket is closed when its padded scores would exceed this multiple of its segments' scores."""


@dataclass(frozen=True)
class Segment:
    """Queries [start, stop) of the row, which see [prefix_start, prefix_stop) and themselves.

    Without a prefix, prefix_start equals prefix_stop.
    """

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def prefix(self) -> int:
        return self.prefix_stop - self.prefix_start

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        """Number of keys that the last query sees."""
        return self.prefix + self.length


def continuation_mask(before: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean mask [length, before + length] of a continuation after `before` keys.

    Query i, at position before + i, sees keys 0 .. before + i.

    Args:
        before: number of keys before the first query.
        length: number of queries.
        window: a query sees only its last `window` keys. None: all keys.
    """
    query = torch.arange(before, before + length, device=device)[:, None]
    key = torch.arange(before + length, device=device)
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


@dataclass(frozen=True)
class Single:
    """One segment in its own call. Its prefix is also a segment."""

    segment: Segment
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self,
        q: dict[int, Tensor],
        k: dict[int, Tensor],
        v: dict[int, Tensor],
        kernel: AttentionLayer,
    ) -> Tensor:
        """Attention of the segment.

        Args:
            q: queries of each segment, [1, H, length, D], by segment start.
            k: keys, by segment start.
            v: values, by segment start.

        Returns:
            [length, H, D].
        """
        s = self.segment
        queries, keys, values = q[s.start], k[s.start], v[s.start]
        if s.prefix == 0:
            return causal_attention(queries, keys, values, kernel)[0].transpose(0, 1)
        keys = torch.cat([k[s.prefix_start], keys], dim=2)
        values = torch.cat([v[s.prefix_start], values], dim=2)
        if kernel.window not in self._masks:
            self._masks[kernel.window] = continuation_mask(
                s.prefix, s.length, kernel.window, queries.device
            )
        return masked_attention(queries, keys, values, kernel, mask=self._masks[kernel.window])[
            0
        ].transpose(0, 1)


@dataclass(frozen=True)
class Bucket:
    """C short segments, padded to L queries and S keys each.

    Attributes:
        queries: [C * L] rows of the queries to gather.
        keys: [C * S] rows of the keys to gather.
        query_at: [C, L] query positions. Padded queries are at 0: they see the first key, so that
            no row is fully masked.
        key_at: [C, S] key positions. Padded keys are beyond every query.
    """

    segments: tuple[Segment, ...]
    queries: Tensor
    keys: Tensor
    query_at: Tensor
    key_at: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Attention of the segments.

        Args:
            q: [C * L, H, D] the gathered queries.
            k: [C * S, H_kv, D] the gathered keys.
            v: [C * S, H_kv, D] the gathered values.

        Returns:
            [C * L, H, D], segment after segment.
        """
        count = len(self.segments)
        queries, keys, values = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
        out = masked_attention(queries, keys, values, kernel, mask=self._mask(kernel.window))
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """Boolean mask, [C, 1, L, S]."""
        if window not in self._masks:
            gap = self.query_at[:, :, None] - self.key_at[:, None]
            self._masks[window] = ((gap >= 0) if window is None else (gap >= 0) & (gap < window))[
                :, None
            ]
        return self._masks[window]


@dataclass(frozen=True)
class AttentionPlan:
    """Calls for all segments of a row, and the order of their outputs.

    Attributes:
        buckets: calls of several segments. Their outputs follow those of `singles`.
        starts: start of each piece of the row, in row order. Each segment of `singles`, and the
            prefix of each, is a piece.
        lengths: length of each piece, in row order.
        order: [N] output row n is row order[n] of the concatenated outputs, which have padding.
            None: they have none and are in order.
        shared: whether several segments see one prefix.
    """

    singles: tuple[Single, ...]
    buckets: tuple[Bucket, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    order: Tensor | None
    shared: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Attention with q [1, H, N, D]; returns [1, N, H, D]. Nothing of size N x N is built."""
        outputs: list[Tensor] = []
        if self.singles:
            # The gradient of one split is one concatenation, while each slice would have a gradient
            # of a whole row of zeros.
            split = (x.split(self.lengths, dim=2) for x in (q, k, v))
            qs, ks, vs = (dict(zip(self.starts, each, strict=True)) for each in split)
            outputs += [single.attend(qs, ks, vs, kernel) for single in self.singles]
        if self.buckets:
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
            queries = take_each(q, [bucket.queries for bucket in self.buckets])
            keys, values = self._take_keys(k), self._take_keys(v)
            outputs += map(
                Bucket.attend, self.buckets, queries, keys, values, [kernel] * len(queries)
            )
        out = torch.cat(outputs)
        return (out if self.order is None else take(out, self.order))[None]

    def _take_keys(self, x: Tensor) -> list[Tensor]:
        """Keys or values [N, H_kv, D] -> [C * S, H_kv, D] of each bucket."""
        rows = [bucket.keys for bucket in self.buckets]
        # The gradient of a shared prefix is summed within each bucket, then over the buckets.
        return [take(x, each) for each in rows] if self.shared else take_each(x, rows)


@dataclass(frozen=True)
class SpanPlan:
    """All segments in one call of a fused kernel.

    Args:
        spans: the segments, in row order, with the keys that each sees.
        keys: [S] row of every key; a prefix is repeated for each segment that sees it. None if each
            segment sees only itself.
    """

    spans: Spans
    keys: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Attention with q [1, H, N, D]; returns [1, N, H, D].

        Scores are not kept and no mask is made.
        """
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if self.keys is not None:
            # Gather in float32: the gradient of a prefix is a sum over its segments, and in a
            # smaller dtype every term would be rounded.
            k, v = (
                take(x.float() if x.dtype.itemsize < 4 else x, self.keys).to(x.dtype)
                for x in (k, v)
            )
        return span_attention(
            q, k, v, self.spans, kernel.scale, kernel.window, kernel.softcap, kernel.sinks
        )[None]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [N, H, D] -> [len(rows), H, D].

    Uses index_select on whole rows: the backward pass of x[rows] adds element by element, which is
    many times slower.
    """
    return x.reshape(x.shape[0], -1).index_select(0, rows).view(-1, *x.shape[1:])


def take_each(x: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """`take` for several lists of rows at once: one gather, whose gradient is one sum."""
    return list(take(x, torch.cat(list(rows))).split([len(each) for each in rows]))


def plan_attention(segments: Sequence[Segment], device: torch.device) -> AttentionPlan | SpanPlan:
    """Attention plan for this device. The segments must tile [0, N): each query occurs once."""
    return plan_calls(segments, device) if device.type == "cpu" else plan_spans(segments, device)


def plan_spans(segments: Sequence[Segment], device: torch.device) -> SpanPlan:
    """Plan with all segments in one call (GPU)."""
    in_row = sorted(segments, key=lambda s: s.start)
    lengths = tuple((s.length, s.keys) for s in in_row)
    offsets = np.zeros((2, len(in_row) + 1), np.int64)
    offsets[:, 1:] = np.cumsum(np.array(lengths).T, axis=1)
    runs = [
        np.arange(a, b)
        for s in in_row
        for a, b in ((s.prefix_start, s.prefix_stop), (s.start, s.stop))
    ]
    keys = np.concatenate(runs) if any(s.prefix for s in in_row) else None
    queries_at, keys_at, *rows = upload([*offsets, *([] if keys is None else [keys])], device)
    return SpanPlan(Spans(lengths, queries_at.int(), keys_at.int()), rows[0] if rows else None)


def plan_calls(segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
    """Plan with long segments alone and short segments in buckets (CPU)."""
    short = sorted(
        (s for s in segments if s.length * s.keys < SHORT), key=lambda s: (s.length, s.keys)
    )
    groups = _group_by_size(short)
    alone = [s for s in segments if s.length * s.keys >= SHORT]
    alone += [group[0] for group in groups if len(group) == 1]
    buckets = tuple(_bucket(group, device) for group in groups if len(group) > 1)
    prefixes = [s.prefix_start for s in segments if s.prefix]
    size = max(s.stop for s in segments)
    pieces = _pieces(alone, size)
    return AttentionPlan(
        singles=tuple(map(Single, alone)),
        buckets=buckets,
        starts=tuple(start for start, _ in pieces),
        lengths=tuple(stop - start for start, stop in pieces),
        order=_order(alone, buckets, size, device),
        shared=len(set(prefixes)) < len(prefixes),
    )


def _order(
    alone: Sequence[Segment], buckets: Sequence[Bucket], size: int, device: torch.device
) -> Tensor | None:
    """Compute `AttentionPlan.order`."""
    outputs = [(s, s.length) for s in alone]
    outputs += [(s, b.query_at.shape[1]) for b in buckets for s in b.segments]
    order, at = torch.empty(size, dtype=torch.int64), 0
    for s, padded in outputs:
        order[s.start : s.stop] = torch.arange(at, at + s.length)
        at += padded
    return None if torch.equal(order, torch.arange(at)) else order.to(device)


def _pieces(alone: Sequence[Segment], size: int) -> list[tuple[int, int]]:
    """Tile [0, size) with the given segments, their prefixes, and what lies between."""
    own = {(s.start, s.stop) for s in alone}
    prefixes = {(s.prefix_start, s.prefix_stop) for s in alone if s.prefix}
    at, tiles = 0, list[tuple[int, int]]()
    for start, stop in sorted(own | prefixes):
        tiles += [(at, start), (start, stop)] if start > at else [(start, stop)]
        at = stop
    return tiles if at == size else [*tiles, (at, size)]


def _group_by_size(short: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments, sorted by size, so that padding stays below WASTE times their own scores."""
    groups: list[list[Segment]] = []
    longest = most = true = 0
    for s in short:
        longest, most, true = max(longest, s.length), max(most, s.keys), true + s.length * s.keys
        if not groups or longest * most * (len(groups[-1]) + 1) > WASTE * true:
            groups.append([])
            longest, most, true = s.length, s.keys, s.length * s.keys
        groups[-1].append(s)
    return groups


def _bucket(segments: Sequence[Segment], device: torch.device) -> Bucket:
    length, keys = max(s.length for s in segments), max(s.keys for s in segments)
    starts, stops, prefix_starts, prefixes = (
        torch.tensor(column)[:, None]
        for column in zip(
            *((s.start, s.stop, s.prefix_start, s.prefix) for s in segments), strict=True
        )
    )
    query = torch.arange(length)
    valid = query < stops - starts
    key = torch.arange(keys)
    own = key - prefixes  # position among the segment's own tokens, negative inside the prefix
    known = own < stops - starts
    rows = torch.where(own < 0, prefix_starts + key, starts + own)
    return Bucket(
        segments=tuple(segments),
        queries=torch.where(valid, starts + query, starts).flatten().to(device),
        keys=torch.where(known, rows, starts).flatten().to(device),
        query_at=torch.where(valid, prefixes + query, 0).to(device),
        key_at=torch.where(known, key, 1 << 40).to(device),
    )
