"""How many tokens the KV cache holds where nobody says so: those that are wanted, or those that fit.

Arithmetic on bytes and tokens alone, without torch: a run asks it with what the GPU has free, and a
plan with what a GPU of some size would have.
"""

from __future__ import annotations

HEADROOM = 0.1
"""Share of a GPU's memory left to fragments, workspaces, CUDA graphs and other processes."""


def wanted_tokens(max_running: int, longest: int, block_size: int) -> int:
    """Room for `max_running` sequences of `longest` tokens each, in whole blocks."""
    return max_running * -(-longest // block_size) * block_size


def tokens_that_fit(free: int, reserved: int, per_token: int, wanted: int) -> int:
    """Tokens of the cache.

    Args:
        free: bytes that the GPU has free now.
        reserved: bytes that are needed later for something else.
        per_token: bytes of one token's keys and values in all layers.
        wanted: tokens that are enough.

    Returns:
        `wanted`, or less where the memory is less; 0 where there is none.
    """
    return max(0, min(wanted, (free - reserved) // per_token))
