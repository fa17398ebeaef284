"""Attention of a packed row, planned once and run in every layer: which spans attend to which, and which of them go in one call.

A segment is a span of queries that sees a prefix span (or none) and, causally, itself.

On a CPU (`AttentionPlan`), long segments are one call each. Short ones, whose calls would cost more than their arithmetic, are gathered into padded
buckets; padding is masked, so the numbers are those of the single calls.

On a GPU (`SpanPlan`), all segments are one call: the keys of a segment are its prefix and itself, and aligned at their ends they need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..batch import upload
from ..kernels.attention import AttentionLayer, causal_attention, masked_attention
from ..kernels.span_attention import Spans, span_attention

SHORT = 256 * 256
"""A segment with fewer scores than this (queries x keys) is worth gathering."""
WASTE = 1.5
"""A bucket is closed when padding would make it this much larger than its segments."""


@dataclass(frozen=True)
class Segment:
    """Queries [start, stop) of the row, which see [prefix_start, prefix_stop) and themselves. An empty prefix: none."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def prefix(self) -> int:
        """Length of the prefix."""
        return self.prefix_stop - self.prefix_start

    @property
    def length(self) -> int:
        """Number of queries."""
        return self.stop - self.start

    @property
    def keys(self) -> int:
        """Keys that the last query sees."""
        return self.prefix + self.length


def continuation_mask(before: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, before + length] boolean: query i, at position before + i, sees keys 0 .. before + i, the last `window` of them."""
    query = torch.arange(before, before + length, device=device)[:, None]
    key = torch.arange(before + length, device=device)
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


@dataclass(frozen=True)
class Single:
    """One segment in a call of its own. Its prefix is a segment too."""

    segment: Segment
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: dict[int, Tensor], k: dict[int, Tensor], v: dict[int, Tensor], kernel: AttentionLayer) -> Tensor:
        """q, k, v: the row cut at the segments, [1, H, length, D] by their starts -> [length, H, D]."""
        s = self.segment
        queries, keys, values = q[s.start], k[s.start], v[s.start]
        if s.prefix == 0:
            return causal_attention(queries, keys, values, kernel)[0].transpose(0, 1)
        keys = torch.cat([k[s.prefix_start], keys], dim=2)
        values = torch.cat([v[s.prefix_start], values], dim=2)
        if kernel.window not in self._masks:
            self._masks[kernel.window] = continuation_mask(s.prefix, s.length, kernel.window, queries.device)
        return masked_attention(queries, keys, values, kernel, mask=self._masks[kernel.window])[0].transpose(0, 1)


@dataclass(frozen=True)
class Bucket:
    """Short segments, padded to one shape [C, L] of queries and [C, S] of keys.

    queries, keys: [C * L], [C * S] rows to gather. query_at, key_at: [C, L], [C, S] positions, padded queries at 0 (they see the first key, so no
    row is fully masked) and padded keys beyond every query. real: flat places of the true queries in C * L.
    """

    segments: tuple[Segment, ...]
    queries: Tensor
    keys: Tensor
    query_at: Tensor
    key_at: Tensor
    real: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, H, N, D] -> [true queries, H, D], segment after segment."""
        count = len(self.segments)
        queries, keys, values = (
            take(x[0].transpose(0, 1), index).view(count, -1, x.shape[1], x.shape[-1]).transpose(1, 2)
            for x, index in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        out = masked_attention(queries, keys, values, kernel, mask=self._mask(kernel.window))
        return take(out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[-1]), self.real)

    def _mask(self, window: int | None) -> Tensor:
        """[C, 1, L, S] boolean."""
        if window not in self._masks:
            gap = self.query_at[:, :, None] - self.key_at[:, None]
            self._masks[window] = ((gap >= 0) if window is None else (gap >= 0) & (gap < window))[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class AttentionPlan:
    """All segments of a row, and where each output row belongs.

    starts, lengths: of the segments, in the row's order. order: [N], output row n is row order[n] of the parts end to end; None: as they are.
    """

    parts: tuple[Single | Bucket, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    order: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, H, N, D] -> [1, N, H, D]; nothing of size N x N is ever built."""
        # Cut once: the gradient of one split is one concatenation, that of every slice is a whole row of zeros.
        qs, ks, vs = (dict(zip(self.starts, x.split(self.lengths, dim=2), strict=True)) for x in (q, k, v))
        out = torch.cat([p.attend(qs, ks, vs, kernel) if isinstance(p, Single) else p.attend(q, k, v, kernel) for p in self.parts])
        return (out if self.order is None else take(out, self.order))[None]


@dataclass(frozen=True)
class SpanPlan:
    """All segments in one call of a fused kernel.

    Args:
        spans: the segments, in the row's order, with the keys that each sees.
        keys: [S] row of every key, a prefix again for each segment that sees it; None if each segment sees only itself.
    """

    spans: Spans
    keys: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, H, N, D] -> [1, N, H, D]; no scores are kept, and no mask is made."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if self.keys is not None:
            # In float32: the gradient of a prefix is a sum over its segments, which must not be rounded at every term.
            k, v = (take(x.float() if x.dtype.itemsize < 4 else x, self.keys).to(x.dtype) for x in (k, v))
        return span_attention(q, k, v, self.spans, kernel.scale, kernel.window, kernel.softcap, kernel.sinks)[None]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [N, H, D] -> [len(rows), H, D]. As whole rows: the backward of x[rows] adds element by element, many times slower."""
    return x.reshape(x.shape[0], -1).index_select(0, rows).view(-1, *x.shape[1:])


def plan_attention(segments: Sequence[Segment], device: torch.device) -> AttentionPlan | SpanPlan:
    """The way to attend on this device. The segments tile the row: together they are [0, N), each query once."""
    return plan_calls(segments, device) if device.type == "cpu" else plan_spans(segments, device)


def plan_spans(segments: Sequence[Segment], device: torch.device) -> SpanPlan:
    """All segments in one call."""
    in_row = sorted(segments, key=lambda s: s.start)
    lengths = tuple((s.length, s.keys) for s in in_row)
    offsets = np.zeros((2, len(in_row) + 1), np.int64)
    offsets[:, 1:] = np.cumsum(np.array(lengths).T, axis=1)
    runs = [np.arange(a, b) for s in in_row for a, b in ((s.prefix_start, s.prefix_stop), (s.start, s.stop))]
    keys = np.concatenate(runs) if any(s.prefix for s in in_row) else None
    queries_at, keys_at, *rows = upload([*offsets, *([] if keys is None else [keys])], device)
    return SpanPlan(Spans(lengths, queries_at.int(), keys_at.int()), rows[0] if rows else None)


def plan_calls(segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
    """Decide which segments go together."""
    short = sorted((s for s in segments if s.length * s.keys < SHORT), key=lambda s: (s.length, s.keys))
    parts: list[Single | Bucket] = [Single(s) for s in segments if s.length * s.keys >= SHORT]
    parts += [_bucket(group, device) if len(group) > 1 else Single(group[0]) for group in _grouped(short)]
    placed = [s for part in parts for s in (part.segments if isinstance(part, Bucket) else (part.segment,))]
    in_row = sorted(segments, key=lambda s: s.start)
    starts, lengths = tuple(s.start for s in in_row), tuple(s.length for s in in_row)
    if all(a.stop == b.start for a, b in pairwise(placed)):
        return AttentionPlan(tuple(parts), starts, lengths, None)
    rows = torch.cat([torch.arange(s.start, s.stop, device=device) for s in placed])
    return AttentionPlan(tuple(parts), starts, lengths, rows.argsort())


def _grouped(short: Sequence[Segment]) -> list[list[Segment]]:
    """Split segments, ordered by size, so that no group is padded to more than WASTE times its own scores."""
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
        torch.tensor(column)[:, None] for column in zip(*((s.start, s.stop, s.prefix_start, s.prefix) for s in segments), strict=True)
    )
    query = torch.arange(length)
    valid = query < stops - starts
    key = torch.arange(keys)
    own = key - prefixes  # place among the segment's own tokens, negative inside the prefix
    known = own < stops - starts
    rows = torch.where(own < 0, prefix_starts + key, starts + own)
    return Bucket(
        segments=tuple(segments),
        queries=torch.where(valid, starts + query, starts).flatten().to(device),
        keys=torch.where(known, rows, starts).flatten().to(device),
        query_at=torch.where(valid, prefixes + query, 0).to(device),
        key_at=torch.where(known, key, 1 << 40).to(device),
        real=valid.flatten().nonzero()[:, 0].to(device),
    )
