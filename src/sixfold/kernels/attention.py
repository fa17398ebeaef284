"""Attention in plain PyTorch, on any device. The C and Triton kernels compute the same function."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .span_attention import Spans, span_attention


@dataclass(frozen=True)
class AttentionLayer:
    """Parameters of one attention layer.

    Attributes:
        layer: index of the layer.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: maximum number of keys that a query sees, including its own; None: no limit.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks: [H] one extra score per head in every softmax, without a value (gpt-oss). The sink
            takes part of the probability, so the weights of the keys sum to less than 1.
    """

    layer: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`masked_attention` with this layer's scale, soft cap and sinks."""
        return masked_attention(q, k, v, self, mask=mask)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: AttentionLayer,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention with an optional mask. Does not apply `kernel.window`: the caller must mask it.

    Args:
        q: [B, H, Q, D] queries.
        k: [B, H_kv, S, D] keys. H is a multiple of H_kv.
        v: [B, H_kv, S, D] values.
        mask: boolean, True = visible, broadcast to [B, 1, Q, S]. None: no mask.
        causal: query i sees keys 0..i. Needs Q == S.

    Returns:
        [B, H, Q, D].
    """
    grouped = q.shape[1] != k.shape[1]
    # No fused GPU kernel supports grouped heads together with a mask.
    if grouped and q.device.type != "cpu":
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    if kernel.softcap is None and kernel.sinks is not None:
        return _with_sink_key(q, k, v, kernel, _explicit(mask, causal, q, k))
    if kernel.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=kernel.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (
        q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale)
    )
    scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    mask = _explicit(mask, causal, q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if kernel.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    sinks = kernel.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


def _explicit(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The causal mask if `causal`, else `mask`. None if every query sees every key."""
    if causal:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return mask


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer, mask: Tensor | None
) -> Tensor:
    """`masked_attention` with sinks, on a fused kernel.

    The sink becomes an extra key that every query sees. The head dimension grows by one: sink /
    scale in queries, 1 in the extra key, 0 in all other keys. So the score of the extra key equals
    the sink. Its value is 0.
    """
    assert kernel.sinks is not None
    size, values = q.shape[-1], v.shape[-1]
    scale = size**-0.5 if kernel.scale is None else kernel.scale
    wide = -(-(max(size, values) + 1) // 8) * 8  # fused kernels need one head size, a multiple of 8
    # Divide before rounding to the queries' dtype: the other order would round twice.
    sinks = kernel.sinks.to(torch.promote_types(q.dtype, torch.float32)) / scale
    rows = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, rows], -1), (0, wide - size - 1))
    key = F.pad(k.new_ones(1), (size, wide - size - 1)).expand(*k.shape[:2], 1, wide)
    k = torch.cat([F.pad(k, (0, wide - size)), key], 2)
    v = F.pad(v, (0, wide - values, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )[..., :values]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
    """Causal self-attention of whole segments, within the layer's window.

    Args:
        q: [B, H, L, D] queries.
        k: [B, H_kv, L, D] keys.
        v: [B, H_kv, L, D] values.

    Returns:
        [B, H, L, D].
    """
    length = q.shape[2]
    if q.device.type != "cpu" or kernel.sinks is not None:
        return _causal_spans(q, k, v, kernel)
    if kernel.window is None or length <= kernel.window:
        return masked_attention(q, k, v, kernel, causal=length > 1)
    at = torch.arange(length, device=q.device)
    seen = (at[:, None] >= at) & (at[:, None] - at < kernel.window)
    return masked_attention(q, k, v, kernel, mask=seen)


def _causal_spans(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
    """`causal_attention` through `span_attention`: each row of the batch is a span."""
    batch, _, length, _ = q.shape
    offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    spans = Spans(((length, length),) * batch, offsets, offsets)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = span_attention(q, k, v, spans, kernel.scale, kernel.window, kernel.softcap, kernel.sinks)
    return out.unflatten(0, (batch, length)).transpose(1, 2)
