"""Floating-point operations per token, and the tokens per second that they allow."""

from __future__ import annotations

FORWARD, TRAINING, RECOMPUTED = 2, 6, 8
"""FLOPs per parameter and token: forward pass, training, training with full recomputation.

A multiply-add counts as two. The backward pass costs two forward passes; recomputation adds one.
"""


def flops_per_token(parameters: float, factor: int) -> float:
    """FLOPs of the matrix products with weights, for one token. Attention scores are not included.

    Args:
        parameters: parameters that one token passes through, without the input embedding.
        factor: `FORWARD`, `TRAINING` or `RECOMPUTED`.
    """
    return factor * parameters


def attention_flops_per_token(
    *, layers: int, heads: int, key_dim: int, value_dim: int, length: int, causal: bool
) -> float:
    """FLOPs of attention scores and weighted values in a forward pass, for one token.

    `2 layers length heads (key_dim + value_dim)`, and half of it if causal. Multiply by 3 for
    training. Megatron-LM halves causal attention; some published MFU figures do not.

    Args:
        key_dim: numbers per key of one head.
        value_dim: numbers per value of one head.
        length: tokens per sequence.
        causal: a token attends only to earlier tokens.
    """
    full = 2.0 * layers * length * heads * (key_dim + value_dim)
    return full / 2 if causal else full


def tokens_per_second(flops: float, *, flops_per_second: float) -> float:
    """Tokens per second if compute is the only limit.

    Args:
        flops: FLOPs per token.
        flops_per_second: sustained FLOPs per second of all devices together. An H100 reaches about
            800e12 of its 989e12 in large matrix products.
    """
    return flops_per_second / flops


def model_flops_utilisation(
    *, flops: float, tokens_per_second: float, devices: int, peak: float
) -> float:
    """Share of the peak that useful FLOPs reach (MFU). 0.5 to 0.65 is excellent for training.

    Args:
        flops: FLOPs per token without recomputation.
        tokens_per_second: measured tokens per second of all devices together.
        devices: number of devices.
        peak: dense peak FLOPs per second of one device.
    """
    return flops * tokens_per_second / (devices * peak)


def prefill_saving(samples: int, completion_share: float) -> float:
    """Factor by which prefix caching reduces work: `K / (1 + K G / P)`.

    It compares K prefills of the prompt with one prefill and K completions. The published formula
    counts completions only after the change, so it understates the saving, and it is below 1 for
    long completions. `memory.group_tokens` counts them on both sides.

    Args:
        samples: samples K per prompt.
        completion_share: completion length divided by prompt length, G / P.
    """
    return samples / (1 + samples * completion_share)
