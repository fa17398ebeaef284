"""Default size of the KV cache: the tokens that are wanted, or those that fit.

This is arithmetic on bytes and tokens, without torch. A run calls it with the memory that its GPU
has free, a plan with the memory of a GPU of a given size.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADROOM = 0.1
"""Share of GPU memory left for fragmentation, workspaces, CUDA graphs and other processes."""


SCALE = 4
"""Bytes of the scale of one key or value in an int8 cache."""


@dataclass(frozen=True)
class CachedNumbers:
    """What the KV cache keeps of one token, over all layers.

    Attributes:
        numbers: numbers in keys and values.
        vectors: keys and values of one head each. Every vector has a scale in an int8 cache.
    """

    numbers: int
    vectors: int


def token_bytes(cached: CachedNumbers, width: int, kv_dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers.

    Args:
        cached: what the cache keeps of a token.
        width: bytes per number in a cache that is not quantised.
        kv_dtype: auto or int8.
    """
    if kv_dtype == "int8":
        return cached.numbers + SCALE * cached.vectors
    return cached.numbers * width


def whole_blocks(tokens: int, block: int) -> int:
    """A number of tokens, rounded up to a multiple of the block size."""
    return -(-tokens // block) * block


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
