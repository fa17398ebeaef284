"""Where our attention enters the model: one function in transformers' attention interface, which asks the caller's layout to attend.

Trainer and engine run the same module. What differs is how tokens are laid out (packed variable-length rows, or a paged cache), so the layout
travels with the call as the keyword `layout` and brings its own attention. Without a layout the call is an ordinary batch of full rows.
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
    """The function that transformers calls in every attention layer; [B, H, T, D] in, [B, T, H, D] out.

    s_aux: [H] attention sinks, as transformers calls them.
    """
    kernel = AttentionLayer(module.layer_idx, scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    if layout is not None:
        return layout.attend(query, key, value, kernel), None
    return causal_attention(query, key, value, kernel).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="sixfold"` known to transformers, but no mask function of that name: without one it does no work on masks, which
    layouts do not need."""
    AttentionInterface.register(NAME, attention)
