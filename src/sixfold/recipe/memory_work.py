"""Memory of one micro-batch and of sampling: activations, logits, casts. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from .memory_part import LOWERED, Part, number_width
from .model_size import ModelSize
from .schema import Recipe

TABLE = 1 << 26
"""Maximum number of logits in one table. Equals `trainer.logprobs.TABLE`, which needs torch."""
BACKWARD_TABLES = 4
"""Float32 [chunk, vocabulary] tables alive at the peak of the loss's backward pass."""
FORWARD_TABLES = 3
"""Float32 [chunk, vocabulary] tables in a forward pass without gradients, and during sampling."""


def layer_bytes(size: ModelSize, width: int, keys: float = 1.0) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    The residual stream is float32, and both norms keep it. Matrix products keep their inputs in the
    dtype of the products. Under autocast, q, k, v, gate and up each have their own cast of the
    input. Attention keeps q, k, v, its result, and one float32 number per head.

    Args:
        size: sizes of the model.
        width: bytes per number in products: 2 under autocast to bfloat16, otherwise 4.
        keys: keys and values that attention keeps per token. Those of a shared prompt count once
            per completion.
    """
    inputs = 5 if width == 2 else 2
    products = (
        inputs * size.hidden + 2 * size.queries + 2 * keys * size.keys + 4 * size.intermediate
    )
    normed = size.queries + size.keys if size.head_norms else 0
    return 4 * (2 * size.hidden + size.heads + 2 + normed) + width * products


def kept_results(size: ModelSize, width: int) -> float:
    """Bytes per token that selective checkpointing keeps of one layer.

    They are the results of matrix products and of attention.
    """
    products = 2 * size.queries + 2 * size.keys + 2 * size.hidden + 2 * size.intermediate
    return width * products + 4 * size.heads


def activation_bytes(size: ModelSize, tokens: int, mode: str, width: int, keys: float = 1.0) -> int:
    """Bytes that a forward pass keeps for the backward pass.

    Args:
        size: sizes of the model.
        tokens: tokens in one micro-batch.
        mode: activation checkpointing: none, selective or full.
        width: bytes per number in products.
        keys: as in `layer_bytes`.
    """
    entrance = 4 * size.hidden
    kept = {"none": 0.0, "selective": kept_results(size, width), "full": 0.0}[mode]
    layer = layer_bytes(size, width, keys) if mode == "none" else entrance + kept
    return int(tokens * (size.layers * layer + 2 * entrance))


def layer_work_bytes(size: ModelSize, tokens: int, mode: str, width: int, keys: float = 1.0) -> int:
    """Bytes that the backward pass of one layer needs in addition to what was kept.

    These are the recomputed results and three gradients of MLP width. The product of gate and up is
    freed by then, because its last reader was the down projection. The net is two tensors of MLP
    width.

    Args:
        size: sizes of the model.
        tokens: tokens in one micro-batch.
        mode: activation checkpointing: none, selective or full.
        width: bytes per number in products.
        keys: as in `layer_bytes`.
    """
    again = 0.0 if mode == "none" else layer_bytes(size, width, keys)
    if mode == "selective":  # these are not recomputed
        again -= width * (2 * size.intermediate + size.queries + size.keys)
    return int(tokens * (again + 2 * width * size.intermediate))


def logit_bytes(chunk: int, vocabulary: int, tables: int = BACKWARD_TABLES) -> int:
    """Bytes of the logits of one chunk of positions, in all tables alive at the peak.

    Args:
        chunk: positions per chunk.
        vocabulary: size of the vocabulary.
        tables: number of float32 tables.
    """
    return tables * 4 * max(1, min(chunk, TABLE // vocabulary)) * vocabulary


def keys_per_token(recipe: Recipe, prompt: int) -> float:
    """Keys and values that attention keeps per token of a packed row, for the longest sequences."""
    new, samples = recipe.episode_tokens, recipe.rollout.samples_per_prompt
    if not recipe.trainer.share_prefix:
        return 1.0
    return (prompt + samples * (prompt + new)) / (prompt + samples * new)


def work_parts(recipe: Recipe, size: ModelSize, prompt: int | None) -> tuple[Part, ...]:
    """Memory of one micro-batch and of sampling, freed after each.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        prompt: longest prompt, in tokens. None: not known.
    """
    trainer, width = recipe.trainer, number_width(recipe)
    # A trajectory longer than the budget gets a micro-batch to itself.
    tokens = max(trainer.max_tokens_per_microbatch, (prompt or 0) + recipe.episode_tokens)
    keys, mode = keys_per_token(recipe, prompt or 0), trainer.activation_checkpointing
    chunk = max(1, min(trainer.logprob_chunk, TABLE // size.vocabulary))
    running = recipe.engine.max_running
    kept = {
        "none": "all inputs of a layer",
        "selective": "a layer's input and its products",
        "full": "a layer's input",
    }[mode]
    head = 4 * size.vocabulary * size.hidden
    cast = LOWERED * (size.parameters - size.vocabulary * size.hidden) if width == LOWERED else 0
    logits = logit_bytes(trainer.logprob_chunk, size.vocabulary)
    # With checkpointing, a layer's casts are freed with its results. Otherwise autocast keeps them
    # until the end of the pass.
    cast_kept, cast_layer = (cast, cast) if mode == "none" else (0, cast // max(1, size.layers))
    layer = layer_work_bytes(size, tokens, mode, width, keys)
    in_loss = cast_kept + logits + 2 * head
    in_layer = max(0, cast_layer + head + layer - in_loss)
    in_forward = max(
        0,
        cast
        + logit_bytes(trainer.logprob_chunk, size.vocabulary, FORWARD_TABLES)
        - in_loss
        - in_layer,
    )
    parts = [
        Part(
            "activations",
            activation_bytes(size, tokens, mode, width, keys),
            f"{tokens:,} tokens, {size.layers} layers, checkpointing {mode}: {kept} are kept",
            samples=False,
        ),
        Part(
            "logits",
            logits,
            f"{BACKWARD_TABLES} tables x {chunk:,} positions x {size.vocabulary:,} x 4 bytes",
            samples=False,
        ),
        Part(
            "head's gradient",
            2 * head,
            f"2 x {size.vocabulary:,} x {size.hidden:,} x 4 bytes, before it is added to the rest",
            samples=False,
        ),
        Part(
            "backward pass of a layer",
            in_layer,
            f"{cast_layer + head + layer:,} bytes, minus the memory of the logits and the head's"
            " gradient, which the backward pass of the loss has freed",
            samples=False,
        ),
        Part(
            "sampler's logits",
            FORWARD_TABLES * 4 * running * size.vocabulary,
            f"{FORWARD_TABLES} tables x {running} sequences x {size.vocabulary:,} x 4 bytes",
            trains=False,
        ),
    ]
    if width == LOWERED:
        gone = (
            ""
            if mode == "none"
            else "; minus the memory that backward passes need, because the casts are freed before"
        )
        says = f"2 bytes per parameter except the embedding's, bfloat16: {cast:,} bytes{gone}"
        parts.insert(0, Part("weights cast in a pass", cast_kept + in_forward, says, samples=False))
    return tuple(parts)
