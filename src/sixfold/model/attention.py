"""Attention function for transformers' attention interface. It delegates to the caller's layout.

Trainer and engine run the same module with different token layouts: packed variable-length rows or
a paged KV cache. The layout is passed through the model as the keyword `layout`, and it computes
the attention. Without a layout, the input is an ordinary batch of full rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ..kernels.attention import AttentionLayer, causal_attention
from .base import Layout

NAME = "sixfold"


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
    """Attention of one layer. transformers calls it in every attention layer.

    Args:
        module: the attention layer; its `layer_idx` is read.
        query: [B, H, T, D].
        key: [B, KV heads, T, D].
        value: [B, KV heads, T, D].
        attention_mask: ignored: attention is causal.
        scaling: factor of the scores; None for D^-0.5.
        sliding_window: number of keys that a query sees; None for all.
        softcap: soft cap of the scores; None for none.
        s_aux: attention sinks [H]. The name is transformers'.
        layout: computes the attention; None for causal attention over full rows.

    Returns:
        Output [B, T, H, D], and None for the attention weights.
    """
    kernel = AttentionLayer(module.layer_idx, scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    if layout is not None:
        return layout.attend(query, key, value, kernel), None
    return causal_attention(query, key, value, kernel).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register `attn_implementation="sixfold"` with transformers.

    No mask function is registered under this name, so transformers builds no masks. Layouts do not
    need them.
    """
    AttentionInterface.register(NAME, attention)
