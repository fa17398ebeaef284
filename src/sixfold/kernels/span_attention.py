"""Attention over many spans in one call, for GPUs. It never stores a queries x keys matrix.

A span is a run of queries and the run of keys that they may see, causally aligned at the ends. All
spans of a packed row are computed in one call, by the first of these kernels that supports it:

    flash      half precision; supports windows and grouped heads
    efficient  also float32, but no windows; repeats keys and values for grouped heads
    chunked    everything, including soft caps and sinks; chunks of queries, in PyTorch

The first two are PyTorch's kernels for ragged batches. They take offsets instead of masks, so
nothing is specialised on the shape of a batch.

`scaled_dot_product_attention` is avoided on purpose. With a mask and grouped heads it would fall
back to a dense product that keeps all scores. On Hopper it would use cuDNN, which builds a plan for
every new shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from .chunked_attention import chunked_attention

Choice = Literal["flash", "efficient", "chunked"]

_HALF = (torch.float16, torch.bfloat16)
_LOWER_RIGHT = 2  # the efficient kernel's code for a causal mask that is aligned at the ends


@dataclass(frozen=True)
class Spans:
    """Spans of queries and keys. In a span of Q queries and S keys, query i sees keys 0 .. S - Q +
    i.

    Args:
        queries: [spans + 1] int32 offset of each span's first query; the last entry is the number
            of queries.
        keys: [spans + 1] int32 offset of each span's first key; the last entry is the number of
            keys.
    """

    lengths: tuple[tuple[int, int], ...]
    queries: Tensor
    keys: Tensor

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum number of queries, and of keys, of any span."""
        return max(q for q, _ in self.lengths), max(s for _, s in self.lengths)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention within each span.

    Args:
        q: [N, H, D] queries, span after span.
        k: [S, H_kv, D] keys, span after span. H is a multiple of H_kv.
        v: [S, H_kv, D_v] values.
        spans: which queries see which keys.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: maximum number of keys that a query sees, including its own; None: no limit.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H] one extra score per head in every softmax, without a value.

    Returns:
        [N, H, D_v], in the autocast dtype if autocast is on, else in the dtype of the values.
    """
    device, size, values = q.device.type, q.shape[-1], v.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scale = size**-0.5 if scale is None else scale
    # The fused kernels do not support sinks.
    choice = (
        "chunked"
        if sinks is not None
        else choose_kernel(device_kernels(q.device), dtype, max(size, values), window, softcap)
    )
    if choice == "chunked":
        return chunked_attention(q, k, v, spans.lengths, scale, window, softcap, sinks)
    wide = -(-max(size, values) // 8) * 8  # both kernels read heads as vectors of 16 bytes
    q, k, v = (
        x.contiguous() if x.shape[-1] == wide else pad(x, (0, wide - x.shape[-1]))
        for x in (q, k, v)
    )
    out = (
        _flash(q, k, v, spans, scale, window)
        if choice == "flash"
        else _efficient_attention(q, k, v, spans, scale)
    )
    return out[..., :values]


def choose_kernel(
    kernels: frozenset[Choice],
    dtype: torch.dtype,
    head_size: int,
    window: int | None,
    softcap: float | None,
) -> Choice:
    """Choose the fastest kernel that computes this attention and its gradient.

    Args:
        dtype: dtype of q, k and v.
        head_size: size of keys or values, whichever is larger.
        window: the layer's window, or None.
        softcap: the layer's soft cap, or None.
    """
    # Flash has no backward pass for head sizes 193 to 224 on some GPUs, and none at all above 256.
    heads_fit = head_size <= 192 or 224 < head_size <= 256
    if "flash" in kernels and dtype in _HALF and heads_fit and softcap is None:
        return "flash"
    # The efficient kernel supports windows, but PyTorch's derivative of it ignores the window.
    if (
        "efficient" in kernels
        and dtype in (*_HALF, torch.float32)
        and window is None
        and softcap is None
    ):
        return "efficient"
    return "chunked"


@cache
def device_kernels(device: torch.device) -> frozenset[Choice]:
    """Kernels that are available on this device with this version of PyTorch."""
    if device.type != "cuda" or torch.version.hip is not None:
        return frozenset({"chunked"})
    flash = _varlen_attn() is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return frozenset({"chunked", "efficient", "flash"} if flash else {"chunked", "efficient"})


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch before 2.10
        return None
    # PyTorch 2.10 and 2.11 support grouped heads without being told.
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return varlen_attn
    return partial(varlen_attn, enable_gqa=True)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, window: int | None
) -> Tensor:
    kernel = _varlen_attn()
    assert kernel is not None
    most_queries, most_keys = spans.longest
    out: Tensor = kernel(
        q,
        k,
        v,
        spans.queries,
        spans.keys,
        most_queries,
        most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return out


def _efficient_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    most_queries, most_keys = spans.longest
    forward: Any = torch.ops.aten._efficient_attention_forward
    out: Tensor = forward(
        q[None],
        k[None],
        v[None],
        None,
        spans.queries,
        spans.keys,
        most_queries,
        most_keys,
        0.0,
        _LOWER_RIGHT,
        torch.is_grad_enabled(),
        scale=scale,
    )[0]
    return out[0]
