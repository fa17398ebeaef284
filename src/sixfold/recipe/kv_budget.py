"""Default size of the KV cache: the tokens that are wanted, or those that fit.

This is arithmetic on bytes and tokens, without torch. A run calls it with the memory that its GPU
has free, a plan with the memory of a GPU of a given size.
"""

from __future__ import annotations

HEADROOM = 0.1
"""Share of GPU memory left for fragmentation, workspaces, CUDA graphs and other processes."""


SCALE = 4
"""Bytes of the scale of one key or value in an int8 cache."""


def token_bytes(numbers: int, head_dim: int, width: int, kv_dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers.

    Args:
        numbers: numbers in the keys and values of one token, over all layers.
        head_dim: numbers in one key or value of one head. Each has a scale in an int8 cache.
        width: bytes per number in a cache that is not quantised.
        kv_dtype: auto or int8.
    """
    return numbers + SCALE * numbers // head_dim if kv_dtype == "int8" else numbers * width


def wanted_tokens(max_running: int, longest: int, block_size: int) -> int:
    """Size of a KV cache in which all sequences can run at full length, in tokens.

    Args:
        max_running: number of sequences.
        longest: longest sequence, in tokens.
        block_size: tokens per block. Each sequence takes whole blocks.
    """
    return max_running * -(-longest // block_size) * block_size


def tokens_that_fit(free: int, reserved: int, per_token: int, wanted: int) -> int:
    """Number of tokens in the KV cache.

    Args:
        free: free bytes of the GPU.
        reserved: bytes that will be needed for other purposes.
        per_token: bytes of the keys and values of one token in all layers.
        wanted: tokens that suffice.

    Returns:
        `wanted`, or fewer if memory does not suffice. 0 if there is none.
    """
    return max(0, min(wanted, (free - reserved) // per_token))
