"""How many tokens the KV cache holds where nobody says so: those that are wanted, or those that fit.

Arithmetic on bytes and tokens alone, without torch: a run asks it with what the GPU has free, and a
plan with what a GPU of some size would have.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADROOM = 0.1
"""Share of a GPU's memory left to fragments, workspaces, CUDA graphs and other processes."""
LOGIT_TABLES = 6
"""Tables of [chunk, vocabulary] float32 numbers alive at the peak of a loss."""
GRADIENT, MOMENTS, WEIGHTS, LOWERED = 4, 8, 4, 2
"""Bytes a parameter: float32 gradient, AdamW's two moments, a float32 copy, a bfloat16 copy."""


@dataclass(frozen=True)
class LayerSizes:
    """A transformer's sizes: layers, width of the residual stream, of an MLP, and of q, k and v."""

    layers: int
    hidden: int
    intermediate: int
    attention: int


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


def held_for_training(parameters: int, *, lowered: bool, references: int, critics: int) -> int:
    """Bytes that training allocates after the policy's weights, and keeps between steps.

    Args:
        parameters: numbers of the policy.
        lowered: the engine keeps a bfloat16 copy of the weights.
        references: frozen models beside it.
        critics: value models of its size, with gradients and moments.
    """
    each = GRADIENT + MOMENTS
    copies = references * WEIGHTS + critics * (WEIGHTS + each) + (LOWERED if lowered else 0)
    return parameters * (each + copies)


def used_while_training(sizes: LayerSizes, tokens: int, chunk: int, vocabulary: int, *, width: int, recompute: bool) -> int:
    """Bytes of a forward and backward pass that are free again when completions are sampled.

    Args:
        sizes: of the model.
        tokens: in one micro-batch.
        chunk: positions whose logits exist at one time.
        vocabulary: numbers in a position's logits.
        width: bytes of a number in the products' dtype.
        recompute: activations of a layer are computed again in its backward pass.
    """
    s = sizes
    # Kept of a layer: the residual stream and the two norms in float32, then the inputs of products.
    layer = 6 * 4 * s.hidden + width * (2 * s.attention + 4 * s.intermediate)
    kept = s.layers * 4 * s.hidden + layer if recompute else s.layers * layer
    return tokens * kept + LOGIT_TABLES * 4 * chunk * vocabulary
