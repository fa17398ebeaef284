"""Chunked attention in plain PyTorch: forward and backward passes over chunks of queries.

It supports what the fused kernels do not: soft caps, sinks, and windows in float32. Only the scores
of one chunk are in memory. The backward pass recomputes them from the saved log-sum-exp, as flash
attention does (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TABLE = 1 << 24
"""Maximum number of scores in memory at a time, over all heads (64 MB in float32)."""


@dataclass(frozen=True)
class _Chunk:
    """Queries [start, stop) and keys [first, last) of a span, as row numbers of q and k.

    `offset` is the last key that the first query sees, counted from `first`.
    """

    start: int
    stop: int
    first: int
    last: int
    offset: int

    def hidden(self, window: int | None, device: torch.device) -> Tensor:
        """Boolean [queries, keys]: True where a query does not see a key."""
        query = torch.arange(self.offset, self.offset + self.stop - self.start, device=device)[
            :, None
        ]
        key = torch.arange(self.last - self.first, device=device)
        hidden = key > query
        return hidden if window is None else hidden | (query - key >= window)


def _chunks(
    every_queries: Sequence[int], every_keys: Sequence[int], heads: int, window: int | None
) -> Iterator[_Chunk]:
    query_start = key_start = 0
    for queries, keys in zip(every_queries, every_keys, strict=True):
        size, seen = queries, keys
        if window is not None:  # `size` neighbouring queries see window + size - 1 keys together
            size = min(queries, max(window, 64))
            seen = min(keys, window + size)
        size = max(1, min(size, TABLE // (heads * seen)))
        for a in range(0, queries, size):
            b = min(queries, a + size)
            before = keys - queries  # the position of query 0
            first = 0 if window is None else max(0, before + a - window + 1)
            yield _Chunk(
                query_start + a,
                query_start + b,
                key_start + first,
                key_start + before + b,
                before + a - first,
            )
        query_start, key_start = query_start + queries, key_start + keys


class _Scores:
    """Scores of one chunk.

    Attributes:
        masked: [H_kv, group * queries, keys] scores, -inf where a query does not see a key.
        tanh: tanh(scores / softcap), which the backward pass needs; None without a soft cap.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        chunk: _Chunk,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        scores = (q @ k.transpose(-1, -2)).mul_(scale)
        self.tanh = None
        if softcap is not None:
            self.tanh = scores.div_(softcap).tanh_()
            scores = self.tanh * softcap
        hidden = chunk.hidden(window, q.device).repeat(q.shape[1] // (chunk.stop - chunk.start), 1)
        self.masked = scores.masked_fill_(hidden, -torch.inf)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[queries, H, D] -> [H_kv, group * queries, D]: group the query heads by KV head."""
    queries, heads, size = x.shape
    grouped = x.reshape(queries, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    return grouped.reshape(kv_heads, -1, size)


def _by_query(x: Tensor, queries: int) -> Tensor:
    """[H_kv, group * queries, D] -> [queries, H, D]."""
    kv_heads, _, size = x.shape
    return x.view(kv_heads, -1, queries, size).permute(2, 0, 1, 3).reshape(queries, -1, size)


# Custom operators: selective checkpointing must see one result to save. It would otherwise save the
# products inside, which are modified in place.
@torch.library.custom_op("sixfold::chunked_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    queries: Sequence[int],
    keys: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    precise = torch.promote_types(q.dtype, torch.float32)
    log_sums = q.new_empty(*q.shape[:2], 1, dtype=precise)
    with torch.autocast(q.device.type, enabled=False):
        for c in _chunks(queries, keys, q.shape[1], window):
            rows, seen = slice(c.start, c.stop), slice(c.first, c.last)
            some_keys, values = (x[seen].transpose(0, 1).to(precise) for x in (k, v))
            scores = _Scores(
                _by_kv_head(q[rows], k.shape[1]).to(precise), some_keys, c, scale, window, softcap
            ).masked
            log_sum = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                of_heads = sinks.to(precise)[:, None].expand(c.stop - c.start, -1, 1)
                log_sum = torch.logaddexp(log_sum, _by_kv_head(of_heads, k.shape[1]))
            out[rows] = _by_query(scores.sub_(log_sum).exp_() @ values, c.stop - c.start).to(
                out.dtype
            )
            log_sums[rows] = _by_query(log_sum, c.stop - c.start)
    return out, log_sums


@torch.library.custom_op("sixfold::chunked_attention_backward", mutates_args=())
def _differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    With probabilities P and delta = rowsum(dO * O): dV = P' dO, dS = P * (dO V' - delta).

    Sinks need no extra terms: they are part of the log-sums, and so of P and O.
    """
    precise, kv_heads = log_sums.dtype, k.shape[1]
    dq, dk, dv = (
        torch.empty_like(q),
        k.new_zeros(k.shape, dtype=precise),
        v.new_zeros(v.shape, dtype=precise),
    )
    with torch.autocast(q.device.type, enabled=False):
        for c in _chunks(queries, keys, q.shape[1], window):
            rows, seen = slice(c.start, c.stop), slice(c.first, c.last)
            some_keys, values = (x[seen].transpose(0, 1).to(precise) for x in (k, v))
            some_queries, of_out, output, log_sum = (
                _by_kv_head(x[rows], kv_heads).to(precise) for x in (q, grad, out, log_sums)
            )
            made = _Scores(some_queries, some_keys, c, scale, window, softcap)
            chance = made.masked.sub_(log_sum).exp_()
            dv[seen] += (chance.transpose(-1, -2) @ of_out).transpose(0, 1)
            delta = (of_out * output).sum(-1, keepdim=True)
            of_scores = (of_out @ values.transpose(-1, -2)).sub_(delta).mul_(chance)
            if made.tanh is not None:
                of_scores.mul_(1 - made.tanh.square_())
            of_scores.mul_(scale)
            dq[rows] = _by_query(of_scores @ some_keys, c.stop - c.start).to(q.dtype)
            dk[seen] += (of_scores.transpose(-1, -2) @ some_queries).transpose(0, 1)
    return dq, dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.others = inputs[4:]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, log_sums = ctx.saved_tensors
    of_sinks = _sinks_gradient(grad, sinks, out, log_sums) if ctx.needs_input_grad[3] else None
    return (
        *_differentiate(grad, q, k, v, out, log_sums, *ctx.others),
        of_sinks,
        *(None,) * len(ctx.others),
    )


def _sinks_gradient(grad: Tensor, sinks: Tensor, out: Tensor, log_sums: Tensor) -> Tensor:
    """Gradient of the sinks [H]: the sum over all queries of dS = -P * delta.

    This follows from `_differentiate`: a sink is a key whose value is 0.
    """
    chance = (sinks.to(log_sums.dtype) - log_sums[..., 0]).exp()
    delta = (grad.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
    return -(chance * delta).sum(0).to(sinks.dtype)


_attend.register_autograd(_backward, setup_context=_remember)


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[tuple[int, int]],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`span_attention` for any combination of window, soft cap and sinks.

    Computes in float32, or in float64 for float64 inputs.

    Args:
        q: [N, H, D] queries, span after span.
        k: [S, H_kv, D] keys, span after span. H is a multiple of H_kv.
        v: [S, H_kv, D_v] values.
        lengths: (queries, keys) of each span.
        scale: factor of the scores.
        window: maximum number of keys that a query sees, including its own; None: no limit.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H] one extra score per head in every softmax, without a value.

    Returns:
        [N, H, D_v], in the dtype of q.
    """
    queries, keys = [a for a, _ in lengths], [b for _, b in lengths]
    out: Tensor = _attend(q, k, v, sinks, queries, keys, scale, window, softcap)[0]
    return out
