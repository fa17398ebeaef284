"""Attention over shared prefixes in PyTorch, one step after another: what the Triton kernels
compute (Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sixfold.engine.shared_prefixes import SharedPrefixes
from sixfold.kernels.attention import AttentionLayer


def cascade_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    shared: SharedPrefixes,
    kernel: AttentionLayer,
) -> Tensor:
    """One query a sequence, q [B, H, D], over dense keys and values [B, H_kv, S, D] -> [B, H, D].
    Says in PyTorch what the Triton kernels compute.
    """
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(len(q))]
    for line, length in zip(shared.members, shared.lengths.tolist(), strict=True):
        rows = line[line >= 0]
        part = _attend(
            q[rows],
            keys[rows[:1], :, :length],
            values[rows[:1], :, :length],
            positions[rows],
            0,
            kernel,
        )
        for row, out, lse in zip(rows, *part, strict=True):
            parts[row].append((out, lse))
    for row, (start, position) in enumerate(
        zip(shared.own.tolist(), positions.tolist(), strict=True)
    ):
        own = slice(start, position + 1)
        out, lse = _attend(
            q[row, None],
            keys[row, None, :, own],
            values[row, None, :, own],
            positions[row, None],
            start,
            kernel,
        )
        parts[row].append((out[0], lse[0]))
    if kernel.sinks is not None:
        for part in parts:
            part.append((torch.zeros_like(part[0][0]), kernel.sinks))
    return torch.stack(
        [
            _merge(torch.stack([o for o, _ in part]), torch.stack([x for _, x in part]))
            for part in parts
        ]
    ).to(q.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, start: int, kernel: AttentionLayer
) -> tuple[Tensor, Tensor]:
    """q [R, H, D] over keys of [1, H_kv, S, D], the first at position `start` -> (out [R, H, D],
    log-sum-exp [R, H]), float32.
    """
    k, v = (
        side.float().repeat_interleave(q.shape[1] // side.shape[1], dim=1)[0] for side in (k, v)
    )
    scores = torch.einsum("rhd,hsd->rhs", q.float(), k) * (
        q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale
    )
    if kernel.softcap is not None:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if kernel.window is not None:
        at = torch.arange(start, start + k.shape[1], device=q.device)
        scores = scores.masked_fill(
            (positions[:, None] - at >= kernel.window)[:, None], float("-inf")
        )
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp()
    return torch.einsum("rhs,hsd->rhd", weights, v), lse


def _merge(outs: Tensor, lses: Tensor) -> Tensor:
    """Parts [P, H, D] with log-sum-exps [P, H] -> the attention over all their keys, [H, D]."""
    return torch.einsum("phd,ph->hd", outs, lses.softmax(0))
