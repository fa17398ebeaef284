"""Memory of a run, part by part, computed from the recipe and the model's sizes. No torch.

`run/kv_size.py` uses it to reserve memory for training before it sizes the KV cache.
`recipe/memory_text.py` displays it (`sixfold explain`). docs/memory.md explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .algorithm_plan import resolve_algorithm
from .kv_budget import HEADROOM, token_bytes, wanted_tokens
from .model_size import ModelSize
from .schema import Recipe

WEIGHTS, GRADIENT, MOMENTS, LOWERED = 4, 4, 8, 2
"""Bytes per parameter: float32 weights, gradient, AdamW's two moments, a bfloat16 copy."""
TABLE = 1 << 26
"""Maximum number of logits in one table. Equals `trainer.logprobs.TABLE`, which needs torch."""
BACKWARD_TABLES = 4
"""Float32 [chunk, vocabulary] tables alive at the peak of the loss's backward pass."""
FORWARD_TABLES = 3
"""Float32 [chunk, vocabulary] tables in a forward pass without gradients, and during sampling."""


@dataclass(frozen=True)
class Part:
    """Memory for one purpose.

    Attributes:
        name: name of the part.
        size: bytes.
        formula: how the bytes follow from sizes and settings.
        trains: allocated while the trainer works.
        samples: allocated while completions are sampled.
        early: already allocated when the KV cache is created.
    """

    name: str
    size: int
    formula: str
    trains: bool = True
    samples: bool = True
    early: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """All parts of a run on one device.

    Attributes:
        parts: in display order.
        cache_wanted: tokens of the KV cache.
        cache_least: minimum tokens of the KV cache: one sequence, or the size set by the recipe.
        cache_token: bytes of one token in the KV cache.
        sequence: tokens of the longest sequence, in whole blocks.
        cache_trains: the KV cache stays allocated while the trainer works.
    """

    parts: tuple[Part, ...]
    cache_wanted: int
    cache_least: int
    cache_token: int
    sequence: int
    cache_trains: bool

    @property
    def training(self) -> int:
        """Bytes while the trainer works, without the KV cache."""
        return sum(p.size for p in self.parts if p.trains)

    @property
    def sampling(self) -> int:
        """Bytes while completions are sampled, without the KV cache."""
        return sum(p.size for p in self.parts if p.samples)

    def needed(self, cache: int) -> int:
        """Peak bytes with a KV cache of `cache` tokens."""
        cached = cache * self.cache_token
        return max(self.sampling + cached, self.training + (cached if self.cache_trains else 0))

    def cache_that_fits(self, total: int, free: int | None = None) -> int | None:
        """Tokens of the KV cache on a device. None if the run does not fit on it.

        Args:
            total: bytes of the device. A tenth is kept as headroom.
            free: bytes not used by other processes. None: all.
        """
        room = (total if free is None else free) - int(HEADROOM * total)
        spare = room - (max(self.sampling, self.training) if self.cache_trains else self.sampling)
        if room < self.training:
            return None
        tokens = min(self.cache_wanted, max(0, spare) // self.cache_token)
        return tokens if tokens >= self.cache_least else None


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


def number_width(recipe: Recipe) -> int:
    """Bytes per number in the matrix products of a forward pass."""
    return 2 if recipe.run.precision == "bfloat16" else 4


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


def held_parts(
    recipe: Recipe, parameters: int, teacher: int | None = None, draft: int | None = None
) -> tuple[Part, ...]:
    """Memory that is held for the whole run.

    Args:
        recipe: the whole run.
        parameters: parameters of the policy.
        teacher: parameters of a separate reference model. None: as the policy.
        draft: parameters of the draft model. None: there is none.
    """
    method, embedded = resolve_algorithm(recipe.algorithm), recipe.rollout.backend.kind == "engine"
    parts = [
        Part("weights", WEIGHTS * parameters, "4 bytes per parameter, float32", early=True),
        Part("gradients", GRADIENT * parameters, "4 bytes per parameter, float32", samples=False),
        Part("AdamW moments", MOMENTS * parameters, "8 bytes per parameter, float32"),
    ]
    if method.needs_reference:
        parts.append(
            Part("reference", WEIGHTS * (teacher or parameters), "4 bytes per parameter, float32")
        )
    if method.needs_critic and recipe.critic.body == "own":
        each = WEIGHTS + GRADIENT + MOMENTS
        parts.append(
            Part(
                "critic",
                each * parameters,
                f"{each} bytes per parameter: weights, gradients, moments",
            )
        )
    if embedded and recipe.run.precision == "bfloat16":
        parts.append(
            Part("engine's weights", LOWERED * parameters, "2 bytes per parameter, bfloat16")
        )
    if embedded and recipe.sync.kind != "shared":
        parts.append(
            Part(
                "sync copy",
                WEIGHTS * parameters,
                f"4 bytes per parameter: sync.kind = {recipe.sync.kind}",
                early=True,
            )
        )
    if draft is not None:
        width = number_width(recipe)
        parts.append(Part("draft model", width * draft, f"{width} bytes per parameter", early=True))
    return tuple(parts)


def memory_plan(
    recipe: Recipe,
    size: ModelSize,
    prompt: int | None,
    longest: int | None,
    teacher: int | None = None,
    draft: ModelSize | None = None,
) -> MemoryPlan:
    """Memory of the run, part by part.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        prompt: longest prompt, in tokens. None: not known.
        longest: longest sequence, in tokens. None: not known.
        teacher: parameters of a separate reference model.
        draft: sizes of the draft model. None: there is none.
    """
    engine, embedded = recipe.engine, recipe.rollout.backend.kind == "engine"
    sequence = wanted_tokens(1, longest, engine.block_size) if longest else 0
    wanted = engine.kv_tokens or engine.max_running * sequence
    work = [p for p in work_parts(recipe, size, prompt) if embedded or p.trains]
    return MemoryPlan(
        parts=(
            *held_parts(recipe, size.parameters, teacher, draft.parameters if draft else None),
            *work,
        ),
        cache_wanted=wanted if embedded else 0,
        cache_least=(engine.kv_tokens or sequence) if embedded else 0,
        cache_token=_cache_token(recipe, size, engine.kv_dtype)
        + (_cache_token(recipe, draft, "auto") if draft else 0),
        sequence=sequence,
        cache_trains=not engine.release_kv,
    )


def _cache_token(recipe: Recipe, size: ModelSize, kv_dtype: str) -> int:
    """Bytes of one token in a model's KV cache."""
    numbers, head_dim = 2 * size.layers * size.keys, size.queries // size.heads
    return token_bytes(numbers, head_dim, number_width(recipe), kv_dtype)
