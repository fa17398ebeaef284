"""Models by their sizes alone: random weights, straight on the device."""

from __future__ import annotations

import torch
from tiny_qwen import Shape
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from sixfold.kernels.norms import fuse_norms
from sixfold.model.attention import NAME, register

SHAPES = {
    "tiny": Shape(
        vocabulary=512, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128
    ),
    "0.5B": Shape(
        vocabulary=151936,
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
    ),
    "1.5B": Shape(
        vocabulary=151936,
        hidden=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        head_dim=128,
        intermediate=8960,
    ),
    "7B": Shape(
        vocabulary=152064,
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
    ),
}
"""Sizes of Qwen 2.5."""
UNTIED = {"7B"}
CONTEXT = 8192


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of the named shape, with our attention."""
    shape = SHAPES[name]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=name not in UNTIED,
    )
    register()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_attn_implementation(NAME)
    fuse_norms(model.eval())
    return model


def decode_bytes(shape: Shape, contexts: list[int], item: int) -> int:
    """Bytes that one decode step must move: every weight that takes part, once, and what the cache
    holds of each sequence. item: bytes a number.

    contexts: tokens that each sequence attends to, the new one included.
    """
    weights = shape.projections + shape.hidden * shape.vocabulary
    return item * (weights + shape.kv_numbers * sum(contexts))
