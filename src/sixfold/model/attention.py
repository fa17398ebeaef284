"""Where our attention enters the model: one function in transformers' attention interface, which asks the caller's layout to attend.

Trainer and engine run the same module. What differs is how tokens are laid out (packed variable-length rows, or a paged cache), so the layout
travels with the call as the keyword `layout` and brings its own attention. Without a layout the call is an ordinary batch of full rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ..kernels.cpu.body_kernels import CompiledAttention
from .span_attention import Spans, span_attention

NAME = "sixfold"


@dataclass(frozen=True)
class Kernel:
    """What one attention layer asks for besides q, k, v.

    Attributes:
        layer: its index.
        scale: of the scores; None: 1 / sqrt(D).
        window: keys that a query sees at most, itself included; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks: [H] one more score of each head, in every softmax; it has no value (gpt-oss). A part
            of it goes to the sink, so the weights of the keys sum to less than 1.
    """

    layer: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`masked_attention` with this layer's scale, soft cap and sinks."""
        return masked_attention(q, k, v, self, mask=mask)


class Layout(Protocol):
    """How the tokens of one forward are arranged, and how they attend to one another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        """q [1, heads, N, D], k and v [1, kv_heads, N, D] -> [1, N, heads, D]."""
        ...


@runtime_checkable
class CompiledLayout(Layout, Protocol):
    """A layout that may have a C function which attends."""

    def compiled(self, q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[Kernel]) -> CompiledAttention | None:
        """For layers whose queries, keys and values are like these. None where there is no such function."""
        ...


def masked_attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention of q [B, H, Q, D] over k, v [B, H_kv, S, D], grouped heads allowed -> [B, H, Q, D].

    mask: boolean, True = may look, broadcast to [B, 1, Q, S]. causal: query i sees keys 0..i (Q == S). The window is the caller's to mask.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":  # grouped heads and a mask together reach no fused kernel of a GPU
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    if kernel.softcap is None and kernel.sinks is not None:
        return _with_sink_key(q, k, v, kernel, _explicit(mask, causal, q, k))
    if kernel.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=kernel.scale, enable_gqa=grouped)
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale)
    scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    mask = _explicit(mask, causal, q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if kernel.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    sinks = kernel.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


def _explicit(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask; that of causal attention if that is asked for; None if every query sees every key."""
    if causal:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return mask


def _with_sink_key(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, mask: Tensor | None) -> Tensor:
    """`masked_attention` with sinks, by a fused kernel.

    The sink becomes a key that every query sees. Heads get one more number: sink / scale in queries,
    1 in this key, 0 in all others. So the score of this key is the sink. Its value is 0.
    """
    assert kernel.sinks is not None
    size, values = q.shape[-1], v.shape[-1]
    scale = size**-0.5 if kernel.scale is None else kernel.scale
    wide = -(-(max(size, values) + 1) // 8) * 8  # fused kernels read heads of one size, in vectors
    # Divided before it is rounded to the dtype of the queries.
    sinks = kernel.sinks.to(torch.promote_types(q.dtype, torch.float32)) / scale
    rows = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, rows], -1), (0, wide - size - 1))
    key = F.pad(k.new_ones(1), (size, wide - size - 1)).expand(*k.shape[:2], 1, wide)
    k = torch.cat([F.pad(k, (0, wide - size)), key], 2)
    v = F.pad(v, (0, wide - values, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])[..., :values]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """Causal attention of a whole segment over itself, q [B, H, L, D] -> [B, H, L, D], with the layer's window."""
    length = q.shape[2]
    if q.device.type != "cpu" or kernel.sinks is not None:
        return _causal_spans(q, k, v, kernel)
    if kernel.window is None or length <= kernel.window:
        return masked_attention(q, k, v, kernel, causal=length > 1)
    at = torch.arange(length, device=q.device)
    seen = (at[:, None] >= at) & (at[:, None] - at < kernel.window)
    return masked_attention(q, k, v, kernel, mask=seen)


def _causal_spans(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """`causal_attention` without a mask: each row of the batch is a span."""
    batch, _, length, _ = q.shape
    offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    spans = Spans(((length, length),) * batch, offsets, offsets)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = span_attention(q, k, v, spans, kernel.scale, kernel.window, kernel.softcap, kernel.sinks)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; [B, H, T, D] in, [B, T, H, D] out.

    s_aux: [H] attention sinks, as transformers calls them.
    """
    kernel = Kernel(module.layer_idx, scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    if layout is not None:
        return layout.attend(query, key, value, kernel), None
    return causal_attention(query, key, value, kernel).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="sixfold"` known to transformers, but no mask function of that name: without one it does no work on masks, which
    layouts do not need."""
    AttentionInterface.register(NAME, attention)
