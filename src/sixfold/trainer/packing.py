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

from ..batch import Batch
from ..model.attention import Kernel, causal_attention, masked_attention


@dataclass(frozen=True)
class Completion:
    """A completion in the row: [start, stop) continues the prompt at [prompt_start, prompt_stop)."""

    prompt_start: int
    prompt_stop: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch. tokens, positions: [N]. prompts: spans that attend causally to themselves. completions: spans that also see a prompt.

    predictor: [S] row index whose hidden state predicts a scored token. target: [S] the scored token. row, column: [S] its place in [B, T].
    """

    tokens: Tensor
    positions: Tensor
    prompts: tuple[tuple[int, int], ...]
    completions: tuple[Completion, ...]
    predictor: Tensor
    target: Tensor
    row: Tensor
    column: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        """Attention layout of the row: q [1, H, N, D] -> [1, N, H, D]; nothing of size N x N is ever built."""
        spans: list[tuple[int, Tensor]] = []
        for start, stop in self.prompts:
            spans.append((start, causal_attention(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], kernel)))
        for c in self.completions:
            keys = torch.cat([k[:, :, c.prompt_start : c.prompt_stop], k[:, :, c.start : c.stop]], dim=2)
            values = torch.cat([v[:, :, c.prompt_start : c.prompt_stop], v[:, :, c.start : c.stop]], dim=2)
            seen = continuation_mask(c.prompt_stop - c.prompt_start, c.stop - c.start, kernel.window, q.device)
            spans.append((c.start, masked_attention(q[:, :, c.start : c.stop], keys, values, kernel, mask=seen)))
        spans.sort(key=lambda span: span[0])
        return torch.cat([out.transpose(1, 2) for _, out in spans], dim=1)


def continuation_mask(before: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, before + length] boolean: query i, at position before + i, sees keys 0 .. before + i, the last `window` of them."""
    query = torch.arange(before, before + length, device=device)[:, None]
    key = torch.arange(before + length, device=device)
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


def pack(batch: Batch, rows: Sequence[int], share_prefix: bool) -> PackedRow:
    """Lay out the trajectories `rows` of the batch; with share_prefix, neighbours with the same group and prompt share one prompt."""
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    prompts: list[tuple[int, int]] = []
    completions: list[Completion] = []
    scored: list[tuple[Tensor, Tensor, int]] = []
    at = 0
    shared: dict[tuple[int, ...], tuple[int, int]] = {}
    mask_rows = batch.mask
    for b in rows:
        length, prompt = int(batch.lengths[b]), int(batch.prompt_lengths[b])
        row = batch.tokens[b, :length]
        columns = mask_rows[b, :length].nonzero()[:, 0]
        if not share_prefix:
            prompts.append((at, at + length))
            tokens.append(row)
            positions.append(torch.arange(length, device=row.device))
            scored.append((columns + at - 1, columns, b))
            at += length
            continue
        key = shared_key(batch, b)
        if key not in shared:
            shared[key] = (at, at + prompt)
            prompts.append(shared[key])
            tokens.append(row[:prompt])
            positions.append(torch.arange(prompt, device=row.device))
            at += prompt
        start, stop = shared[key]
        if length > prompt:
            completions.append(Completion(start, stop, at, at + length - prompt))
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
        prompts=tuple(prompts),
        completions=tuple(completions),
        predictor=torch.cat([p for p, _, _ in scored]),
        target=batch.tokens[row_index, column],
        row=row_index,
        column=column,
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
