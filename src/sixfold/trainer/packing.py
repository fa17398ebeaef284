"""Packed rows: trajectories of a micro-batch in one row of N tokens without padding, a shared prompt computed once for all its completions.

A row is a list of prompts, each followed by the completions that continue it. A prompt attends causally to itself; a completion to its prompt
and causally to itself, at positions that go on from the prompt's. So every hidden state is the one that the trajectory alone would have, and
the gradient of the prompt's part is the sum over its completions, as it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch, KeptSets
from ..model.attention import Kernel
from .segments import AttentionPlan, Segment, SpanPlan, plan_attention


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch as a row of N tokens, and as a layout for the model's attention.

    tokens, positions: [N]. attention: who sees whom. predictor: [S] row index whose hidden state predicts a scored token. target: [S] the scored
    token. row, column: [S] its place in [B, T]. kept: [S] what could have been drawn there; None: everything.
    """

    tokens: Tensor
    positions: Tensor
    attention: AttentionPlan | SpanPlan
    predictor: Tensor
    target: Tensor
    row: Tensor
    column: Tensor
    kept: KeptSets | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        """q [1, H, N, D] -> [1, N, H, D]."""
        return self.attention.attend(q, k, v, kernel)


def pack(batch: Batch, rows: Sequence[int], share_prefix: bool) -> PackedRow:
    """Lay out the trajectories `rows` of the batch; with share_prefix, neighbours with the same group and prompt share one prompt."""
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    segments: list[Segment] = []
    scored: list[tuple[Tensor, Tensor, int]] = []
    at = 0
    shared: dict[tuple[int, ...], tuple[int, int]] = {}
    mask_rows = batch.mask
    for b in rows:
        length, prompt = int(batch.lengths[b]), int(batch.prompt_lengths[b])
        row = batch.tokens[b, :length]
        columns = mask_rows[b, :length].nonzero()[:, 0]
        if not share_prefix:
            segments.append(Segment(at, at + length))
            tokens.append(row)
            positions.append(torch.arange(length, device=row.device))
            scored.append((columns + at - 1, columns, b))
            at += length
            continue
        key = shared_key(batch, b)
        if key not in shared:
            shared[key] = (at, at + prompt)
            segments.append(Segment(*shared[key]))
            tokens.append(row[:prompt])
            positions.append(torch.arange(prompt, device=row.device))
            at += prompt
        start, stop = shared[key]
        if length > prompt:
            segments.append(Segment(at, at + length - prompt, start, stop))
            tokens.append(row[prompt:])
            positions.append(torch.arange(prompt, length, device=row.device))
            predictor = torch.where(columns == prompt, stop - 1, columns - prompt - 1 + at)
            scored.append((predictor, columns, b))
            at += length - prompt
    column = torch.cat([c for _, c, _ in scored])
    row_index = torch.cat([torch.full_like(c, b) for _, c, b in scored])
    return PackedRow(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        attention=plan_attention(segments, batch.tokens.device),
        predictor=torch.cat([p for p, _, _ in scored]),
        target=batch.tokens[row_index, column],
        row=row_index,
        column=column,
        kept=None if batch.kept is None else batch.kept[row_index, column],
    )


def microbatches(batch: Batch, rows: Sequence[int], max_tokens: int, share_prefix: bool) -> list[list[int]]:
    """Split trajectories into micro-batches of at most max_tokens computed tokens, groups in order so that prompts can be shared.

    A prompt is counted again in every micro-batch that its group reaches into. A trajectory longer than max_tokens gets a micro-batch of its own.
    """
    parts: list[list[int]] = []
    used, seen = 0, set[tuple[int, ...]]()
    for b in rows:
        length, prompt, key = int(batch.lengths[b]), int(batch.prompt_lengths[b]), shared_key(batch, b)
        cost = length - prompt if share_prefix and key in seen else length
        if parts and used + cost > max_tokens:
            parts.append([])
            used, seen, cost = 0, set(), length
        if not parts:
            parts.append([])
        parts[-1].append(b)
        used += cost
        seen.add(key)
    return parts


def shared_key(batch: Batch, row: int) -> tuple[int, ...]:
    """Rows with the same key may share a computed prompt: its group and its tokens (a group's prompts may differ, e.g. in their examples)."""
    return int(batch.group[row]), *batch.tokens[row, : int(batch.prompt_lengths[row])].tolist()
