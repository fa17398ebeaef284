"""Memory of the KV cache, per token and for many sequences."""

from __future__ import annotations

from . import checks


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, width: int) -> int:
    """Bytes of the keys and values of one token: `2 * layers * kv_heads * head_dim * width`.

    Args:
        layers: layers with attention.
        kv_heads: key-value heads. Fewer than query heads with grouped-query attention.
        head_dim: numbers per head.
        width: bytes per number: 2 for bfloat16, 1 for FP8 and int8 (without scales).

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(layers=layers, kv_heads=kv_heads, head_dim=head_dim, width=width)
    return 2 * layers * kv_heads * head_dim * width


def latent_bytes_per_token(*, layers: int, latent: int, rotary: int, width: int) -> int:
    """Bytes of one token with multi-head latent attention: `layers * (latent + rotary) * width`.

    https://arxiv.org/abs/2405.04434, Table 1. Tensor parallelism replicates the latent cache.

    Args:
        layers: number of layers.
        latent: width of the compressed keys and values (`kv_lora_rank`).
        rotary: width of the shared rotary key (`qk_rope_head_dim`).
        width: bytes per number.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(layers=layers, latent=latent, rotary=rotary, width=width)
    return layers * (latent + rotary) * width


def cache_bytes(per_token: int, *, sequences: int, length: int) -> int:
    """Bytes of the cache if all sequences have the same length.

    Args:
        per_token: bytes of one token.
        sequences: concurrent sequences.
        length: tokens per sequence.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(per_token=per_token, sequences=sequences, length=length)
    return per_token * sequences * length


def cache_tokens(*, device_bytes: float, used_bytes: float, per_token: float) -> int:
    """Tokens that fit in the memory that weights and activations leave. 0 if nothing is left.

    Args:
        device_bytes: memory that may be used, in bytes.
        used_bytes: memory for weights, activations and buffers, in bytes.
        per_token: bytes of one token on this device.

    Raises:
        UserError: if `per_token` is not above 0 or another number is negative.
    """
    checks.not_negative(device_bytes=device_bytes, used_bytes=used_bytes)
    checks.positive(per_token=per_token)
    return max(0, int((device_bytes - used_bytes) // per_token))


def group_tokens(*, prompt: int, completion: int, samples: int, shared: bool) -> int:
    """Tokens in the cache for one group: `P + K G` with a shared prompt, else `K (P + G)`.

    Args:
        prompt: prompt length P, in tokens.
        completion: completion length G, in tokens.
        samples: samples K per prompt.
        shared: the samples read one copy of the prompt's blocks.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(prompt=prompt, completion=completion, samples=samples)
    return (prompt if shared else samples * prompt) + samples * completion
