"""Packed rows: the trajectories of a micro-batch in one row of N tokens, without padding.

A shared prompt is computed once for all its completions. A row is a list of prompts, each followed
by its completions. A prompt attends causally to itself. A completion attends to its prompt and
causally to itself; its positions continue those of the prompt. Therefore every hidden state equals
that of the trajectory computed alone, and the gradient of the prompt is the sum over its
completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, KeptSets, send, upload
from ..kernels.attention import AttentionLayer
from ..model.base import Layout
from ..model.experts import OWN
from ..types import Routes
from .segments import Segment, plan_attention


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch as a row of N tokens, of which S are scored.

    It is also the attention layout.

    Args:
        tokens: [N] token ids.
        positions: [N] position of each token in its trajectory.
        attention: computes which tokens attend to which.
        reads: [S] index in the row of the hidden state that the head reads for each score. It is
            that of the token before the scored one, which has not seen the scored token.
        target: [S] id of the scored token.
        row: [S] row of the scored token in the batch.
        column: [S] column of the scored token in the batch.
        slot: [S] index of that row among the micro-batch's rows.
        members: [R] rows of the batch in this micro-batch.
        kept: [S] tokens that could have been sampled there. None: the whole vocabulary.
        copies: [N] on the host, number of trajectories that contain each token. It exceeds 1 only
            in a shared prompt.
        experts: [N, layers, k] experts that computed each token at sampling, int16. OWN for tokens
            without a record. None if no token has one.
        host_reads: [S] copy of `reads` on the host.
    """

    tokens: Tensor
    positions: Tensor
    attention: Layout
    reads: Tensor
    target: Tensor
    row: Tensor
    column: Tensor
    slot: Tensor
    members: Tensor
    kept: KeptSets | None = None
    copies: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    experts: Tensor | None = None
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    host_reads: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Attention with q [1, H, N, D]; returns [1, N, H, D]."""
        return self.attention.attend(q, k, v, kernel)


def pack(batch: Batch, rows: Sequence[int], share_prefix: bool) -> PackedRow:
    """Pack trajectories of a batch into one row.

    Everything is computed on the host. It is sent to the batch's device in one copy, plus one copy
    for the attention plan.

    Args:
        share_prefix: whether trajectories of one group with the same prompt share one copy of it.
    """
    host, device = batch.at_host(), batch.tokens.device
    layout = _Layout(
        host.tokens.numpy(), host.mask.numpy(), host.lengths.tolist(), host.prompt_lengths.tolist()
    )
    for b in rows:
        layout.add(b, shared_key(host, b) if share_prefix else None)
    row, column = np.concatenate(layout.row), np.concatenate(layout.column)
    slot = np.repeat(np.arange(len(rows)), [len(columns) for columns in layout.column])
    reads = np.concatenate(layout.reads)
    arrays = [
        *map(np.concatenate, (layout.tokens, layout.positions)),
        reads,
        host.tokens.numpy()[row, column],
        row,
        column,
    ]
    kept = None if host.kept is None else host.kept[torch.from_numpy(row), torch.from_numpy(column)]
    extra = [] if kept is None else [kept.start.numpy(), kept.count.numpy()]
    sent = upload([*arrays, slot, np.array(rows), *extra], device)
    if kept is not None and batch.kept is not None:
        kept = KeptSets(batch.kept.ids, sent[8], sent[9], kept.count)
    return PackedRow(
        tokens=sent[0],
        positions=sent[1],
        attention=plan_attention(layout.segments, device),
        reads=sent[2],
        target=sent[3],
        row=sent[4],
        column=sent[5],
        slot=sent[6],
        members=sent[7],
        kept=kept,
        copies=np.repeat(layout.copies, [segment.length for segment in layout.segments]),
        experts=_sampled_experts(host.routes, layout, device),
        segments=tuple(layout.segments),
        host_reads=reads,
    )


def _sampled_experts(
    routes: Sequence[Routes | None], layout: _Layout, device: torch.device
) -> Tensor | None:
    """Compute `PackedRow.experts`. A shared prompt has the record of its first trajectory.

    Args:
        routes: record of each row of the batch, or None for a row without one.
    """
    known = {b: r for b, _ in layout.runs if routes and (r := routes[b]) is not None}
    if not known:
        return None
    first = next(iter(known.values()))
    shape = (layout.used, first.layers, first.top_k)
    experts = np.full(shape, OWN, dtype=np.int16)
    for segment, (b, start) in zip(layout.segments, layout.runs, strict=True):
        if b in known:
            numbers = np.frombuffer(known[b].data, dtype=f"<u{known[b].width}")
            found = numbers.reshape(-1, *shape[1:])[start : start + segment.length]
            experts[segment.start : segment.start + len(found)] = found
    return send(torch.from_numpy(experts), device)


@dataclass
class _Layout:
    """Builder of a packed row.

    The first four fields come from the batch, on the host. The lists have one entry per segment of
    tokens. An entry of `runs` is (row of the batch, first column).
    """

    batch_tokens: np.ndarray
    mask: np.ndarray
    lengths: list[int]
    prompts: list[int]
    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    reads: list[np.ndarray] = field(default_factory=list)
    row: list[np.ndarray] = field(default_factory=list)
    column: list[np.ndarray] = field(default_factory=list)
    shared: dict[bytes, int] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    used: int = 0

    def add(self, b: int, key: bytes | None) -> None:
        """Append trajectory b.

        If a key is given, the prompt is computed once for all trajectories with that key. If it is
        None, the prompt is computed for b alone.
        """
        length, prompt = self.lengths[b], self.prompts[b]
        columns = self.mask[b, :length].nonzero()[0]
        if key is None:
            at = self._run(b, 0, length).start
            self._score(b, columns, columns - 1 + at)
            return
        if key not in self.shared:
            self.shared[key] = len(self.segments)
            self._run(b, 0, prompt)
        else:
            self.copies[self.shared[key]] += 1
        before = self.segments[self.shared[key]]
        if length > prompt:
            at = self._run(b, prompt, length, before).start
            read = columns - 1
            self._score(
                b,
                columns,
                np.where(read < prompt, before.start + read, at + read - prompt),
            )
        else:
            self._score(b, columns[:0], columns[:0])

    def _run(self, b: int, first: int, last: int, prefix: Segment | None = None) -> Segment:
        """Append tokens [first, last) of trajectory b as one segment."""
        segment = Segment(
            self.used, self.used + last - first, *((prefix.start, prefix.stop) if prefix else ())
        )
        self.tokens.append(self.batch_tokens[b, first:last])
        self.positions.append(np.arange(first, last))
        self.segments.append(segment)
        self.copies.append(1)
        self.runs.append((b, first))
        self.used = segment.stop
        return segment

    def _score(self, b: int, columns: np.ndarray, reads: np.ndarray) -> None:
        self.reads.append(reads)
        self.row.append(np.full_like(columns, b))
        self.column.append(columns)


def filler(batch: Batch) -> PackedRow:
    """An empty micro-batch: two tokens whose score no loss reads.

    A rank without rows runs it forward and backward through the whole model, because the other
    ranks wait for this rank in both passes.
    """
    device = batch.tokens.device
    zero, one = (torch.full((1,), n, device=device) for n in (0, 1))
    segments = (Segment(0, 2),)
    return PackedRow(
        tokens=batch.tokens[0, :2],
        positions=torch.arange(2, device=device),
        attention=plan_attention(segments, device),
        reads=zero,
        target=batch.tokens[0, 1:2],
        row=zero,
        column=one,
        slot=zero,
        members=zero,
        copies=np.zeros(2, dtype=np.int64),
        segments=segments,
        host_reads=np.zeros(1, dtype=np.int64),
    )


def units(host: Batch, rows: Iterable[int]) -> list[list[int]]:
    """Group rows by `Batch.unit`, in the order of each unit's first row."""
    if host.unit is None:
        return [[b] for b in rows]
    number, found = host.unit.tolist(), dict[int, list[int]]()
    for b in rows:
        found.setdefault(number[b], []).append(b)
    return list(found.values())


def microbatches(
    batch: Batch, rows: Sequence[int], max_tokens: int, share_prefix: bool
) -> list[list[int]]:
    """Split trajectories into micro-batches of at most max_tokens computed tokens.

    The order of `rows` is kept, so the trajectories of a group stay together and can share a
    prompt. Rows of one unit move to its first row and are never split. A prompt counts again in
    every micro-batch that contains part of its group. A unit longer than max_tokens gets its own
    micro-batch.

    Args:
        max_tokens: maximum computed tokens per micro-batch.
        share_prefix: whether a shared prompt counts only once per micro-batch.

    Returns:
        Rows of each micro-batch.
    """
    host = batch.at_host()
    lengths, prompts = host.lengths.tolist(), host.prompt_lengths.tolist()
    parts: list[list[int]] = []
    used, seen = 0, set[bytes]()

    def cost(unit: list[tuple[int, bytes]], seen: set[bytes]) -> int:
        """Tokens to compute for the unit if the prompts in `seen` are computed already."""
        total, own = 0, set[bytes]()
        for b, key in unit:
            shared = share_prefix and (key in seen or key in own)
            total += lengths[b] - (prompts[b] if shared else 0)
            own.add(key)
        return total

    for unit in ([(b, shared_key(host, b)) for b in whole] for whole in units(host, rows)):
        size = cost(unit, seen)
        if not parts or used + size > max_tokens:
            parts.append([])
            used, seen = 0, set()
            size = cost(unit, seen)
        used += size
        seen.update(key for _, key in unit)
        parts[-1] += [b for b, _ in unit]
    return parts


def shared_key(host: Batch, row: int) -> bytes:
    """Key of a row's prompt: rows with equal keys may share a computed prompt.

    The key is the group and the prompt tokens, because prompts within a group can differ (for
    example in their few-shot examples). `host` is a batch on the CPU.
    """
    prompt = host.tokens[row, : int(host.prompt_lengths[row])]
    return host.group[row].numpy().tobytes() + prompt.numpy().tobytes()
