"""Memory that is used for one micro-batch or for sampling: activations, logits, casts. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .algorithm_plan import resolve_algorithm
from .memory_held import Holdings
from .memory_part import LOWERED, WEIGHTS, Part, number_width
from .model_size import ModelSize
from .schema import Recipe

TABLE = 1 << 26
"""Maximum number of logits in one table. Equals `trainer.logprobs.TABLE`, which needs torch."""
SMALL = 1 << 22
"""Tables of at most this many logits are left to autograd: `trainer.logprobs.SMALL`."""
SLICE = 1 << 24
"""Maximum size of a temporary share of the head's gradient: `trainer.fused_head.SLICE`."""
ENTROPY_TABLE = 1 << 22
"""Log-probs whose entropies are computed at once: `trainer.fused_head.ENTROPY_TABLE`."""
TILE_ROWS, TILE_COLUMNS = 512, 2048
"""Largest tile of logits on a CPU: `trainer.tiled_head.ROWS` and `COLUMNS`."""
NF4_SLICE = 1 << 22
"""Numbers of an NF4 matrix that are converted at once: `model.nf4.SLICE`."""
BACKWARD_TABLES = 4
"""Float32 [chunk, vocabulary] tables at the peak of the loss's backward pass, with autograd."""
FORWARD_TABLES = 3
"""Float32 [chunk, vocabulary] tables in a forward pass with autograd, and during sampling."""
ADAPTERS = 7
"""Adapters per decoder layer, if each of its linear modules has one."""


def layer_bytes(
    size: ModelSize, width: int, keys: float = 1.0, rank: int = 0, masked: int = 0
) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    The residual stream is float32, and both norms keep it. Matrix products keep their inputs in the
    dtype of the products. Under autocast, q, k, v, gate and up each have their own cast of the
    input. Attention keeps q, k, v, its result, and one float32 number per head.

    Args:
        size: sizes of the model.
        width: bytes per number in products: 2 under autocast to bfloat16, otherwise 4.
        keys: keys and values that attention keeps per token. Those of a shared prompt count once
            per completion.
        rank: rank of LoRA adapters; 0: none. The adapters' inputs are kept instead of those of the
            frozen products. Under autocast the adapter of o_proj keeps a cast of its own.
        masked: keys in the mask of one query, on a CPU. There, attention runs in several calls: it
            keeps their masks, and a copy of their results in one row. 0: on a GPU.
    """
    inputs = 5 if width == 2 else 2
    products = (
        inputs * size.hidden + 2 * size.queries + 2 * keys * size.keys + 4 * size.intermediate
    )
    if rank:
        products += ADAPTERS * rank + (size.queries if width == 2 else 0)
    if masked:
        products += masked + size.queries
    normed = size.queries + size.keys if size.head_norms else 0
    return 4 * (2 * size.hidden + size.heads + 2 + normed) + width * products


def kept_results(size: ModelSize, width: int, rank: int = 0) -> float:
    """Bytes per token that selective checkpointing keeps of one layer.

    They are the results of matrix products and of attention. Each LoRA adapter has two products.

    Args:
        size: sizes of the model.
        width: bytes per number in products.
        rank: rank of LoRA adapters. 0: none.
    """
    products = size.queries + 2 * size.keys + 2 * size.hidden + 2 * size.intermediate
    adapters = products + ADAPTERS * rank if rank else 0
    return width * (products + adapters + size.queries) + 4 * size.heads


def activation_bytes(
    size: ModelSize,
    tokens: int,
    mode: str,
    width: int,
    keys: float = 1.0,
    rank: int = 0,
    masked: int = 0,
) -> int:
    """Bytes that a forward pass keeps for the backward pass.

    Args:
        size: sizes of the model.
        tokens: tokens in one micro-batch.
        mode: activation checkpointing: none, selective or full.
        width: bytes per number in products.
        keys: as in `layer_bytes`.
        rank: as in `layer_bytes`.
        masked: as in `layer_bytes`.
    """
    entrance = 4 * size.hidden
    kept = {"none": 0.0, "selective": kept_results(size, width, rank), "full": 0.0}[mode]
    layer = entrance + kept
    if mode == "none":
        layer = layer_bytes(size, width, keys, rank, masked)
    return int(tokens * (size.layers * layer + 2 * entrance))


def layer_work_bytes(
    size: ModelSize,
    tokens: int,
    mode: str,
    width: int,
    keys: float = 1.0,
    rank: int = 0,
    masked: int = 0,
) -> int:
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
        rank: as in `layer_bytes`.
        masked: as in `layer_bytes`.
    """
    again = 0.0 if mode == "none" else layer_bytes(size, width, keys, rank, masked)
    if mode == "selective":  # these are not recomputed
        again -= width * (2 * size.intermediate + size.queries + size.keys)
    return int(tokens * (again + 2 * width * size.intermediate))


@dataclass(frozen=True)
class HeadWork:
    """Memory of the output head in a training pass, in bytes.

    Attributes:
        chunk: positions whose logits exist at the same time.
        columns: tokens of the vocabulary in one table: all, or those of a tile.
        tables: float32 [chunk, columns] tables in the backward pass.
        logits: bytes of these tables.
        forward: bytes of the tables in the forward pass, including those of the entropies.
        cast: copy of the head's weight in the dtype of the matrix product. 0: no copy is needed.
        gradient: gradients of the head's weight in the backward pass of the loss.
        waiting: the head's gradient during the backward pass of the layers, if head and embedding
            are tied: it waits for the embedding's gradient.
    """

    chunk: int
    columns: int
    tables: float
    logits: int
    forward: int
    cast: int
    gradient: int
    waiting: int


def head_work(recipe: Recipe, size: ModelSize, tokens: int, held: Holdings) -> HeadWork:
    """Memory of the output head in a training pass.

    Tables with more than SMALL logits are computed by `trainer/fused_head.py`, one at a time, on a
    GPU with a bfloat16 cast, or on a CPU in tiles. Smaller ones are left to autograd.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        tokens: tokens in one micro-batch.
        held: counts of the numbers that the run keeps.
    """
    chunk = max(1, min(recipe.trainer.logprob_chunk, TABLE // size.vocabulary))
    table = 4 * chunk * size.vocabulary
    weight = 4 * size.table
    frozen = held.adapter > 0
    waiting = 0 if frozen or not size.tied else weight
    if min(chunk, tokens) * size.vocabulary <= SMALL:
        gradient = 0 if frozen else 2 * weight
        forward = FORWARD_TABLES * table
        tables = BACKWARD_TABLES, BACKWARD_TABLES * table
        return HeadWork(chunk, size.vocabulary, *tables, forward, 0, gradient, waiting)
    if _tiled(recipe, size):
        rows = min(TILE_ROWS, tokens)
        tile = 4 * rows * TILE_COLUMNS
        # With one rank the gradient is added to that of the embedding or the head itself.
        gradient, waiting = (0, 0) if held.ranks == 1 or frozen else (weight, waiting)
        return HeadWork(rows, TILE_COLUMNS, 1, tile, tile, 0, gradient, waiting)
    lowered, on_gpu = recipe.run.precision == "bfloat16", recipe.run.device != "cpu"
    count = 1.5 if lowered and on_gpu else 1.0
    cast = (LOWERED * size.table if on_gpu else weight) if lowered else 0
    stored = held.lowered == held.matrices or (held.lowered > 0 and not size.tied)
    if on_gpu and stored:
        cast = 0  # the head is stored in bfloat16
    gradient = 0 if frozen else weight + min(4 * SLICE, weight)
    forward = table + 2 * min(table, 4 * ENTROPY_TABLE)
    logits = int(count * table)
    return HeadWork(chunk, size.vocabulary, count, logits, forward, cast, gradient, waiting)


def _tiled(recipe: Recipe, size: ModelSize) -> bool:
    """True if `trainer/tiled_head.py` computes a large head."""
    rollout, on_cpu = recipe.rollout, recipe.run.device == "cpu"
    truncates = rollout.top_p < 1 or rollout.top_k or rollout.min_p
    entropy = resolve_algorithm(recipe.algorithm).entropy_in_loss
    plain = number_width(recipe) == WEIGHTS and not truncates and not entropy
    return on_cpu and plain and size.vocabulary > TILE_COLUMNS


def keys_per_token(recipe: Recipe, prompt: int) -> float:
    """Keys and values that attention keeps per token of a packed row, for the longest sequences."""
    new, samples = recipe.episode_tokens, recipe.rollout.samples_per_prompt
    if not recipe.trainer.share_prefix:
        return 1.0
    return (prompt + samples * (prompt + new)) / (prompt + samples * new)


def masked_keys(recipe: Recipe, prompt: int | None) -> int:
    """Keys in the mask of one query, as in `layer_bytes`: those of the longest sequence.

    Args:
        recipe: the whole run.
        prompt: longest prompt, in tokens. None: not known.
    """
    return (prompt or 0) + recipe.episode_tokens if recipe.run.device == "cpu" else 0


def microbatch_tokens(recipe: Recipe, prompt: int | None) -> int:
    """Tokens of the largest micro-batch.

    Args:
        recipe: the whole run.
        prompt: longest prompt, in tokens. None: not known.
    """
    # A trajectory longer than the budget gets a micro-batch to itself.
    return max(recipe.trainer.max_tokens_per_microbatch, (prompt or 0) + recipe.episode_tokens)


def rank_tokens(recipe: Recipe, prompt: int | None, held: Holdings) -> int:
    """Tokens of the largest micro-batch that one rank computes.

    Args:
        recipe: the whole run.
        prompt: longest prompt, in tokens. None: not known.
        held: counts of the numbers that the run keeps.
    """
    return -(-microbatch_tokens(recipe, prompt) // held.context)


def rank_keys(recipe: Recipe, prompt: int | None, held: Holdings) -> float:
    """Keys and values that attention keeps per token that a rank computes.

    In a context group, attention keeps all keys that the rank's queries see. A rank computes a part
    of at most two sequences, of which it needs earlier keys too: less than one whole sequence more.

    Args:
        recipe: the whole run.
        prompt: longest prompt, in tokens. None: not known.
        held: counts of the numbers that the run keeps.
    """
    keys = keys_per_token(recipe, prompt or 0)
    if held.context == 1:
        return keys
    sequence = (prompt or 0) + recipe.episode_tokens
    return keys + held.context * sequence / microbatch_tokens(recipe, prompt)


def work_parts(
    recipe: Recipe, size: ModelSize, prompt: int | None, held: Holdings
) -> tuple[Part, ...]:
    """Memory that is allocated for a micro-batch, or for sampling, and freed afterwards.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        prompt: longest prompt, in tokens. None: unknown.
        held: counts of the numbers that the run keeps.
    """
    trainer, width, rank = recipe.trainer, number_width(recipe), recipe.model.lora.rank
    tokens = rank_tokens(recipe, prompt, held)
    keys, mode = rank_keys(recipe, prompt, held), trainer.activation_checkpointing
    running = recipe.engine.max_running
    kept = {
        "none": "all inputs of a layer",
        "selective": "a layer's input and its products",
        "full": "a layer's input",
    }[mode]
    own = size.in_group(held.tensor)
    masked = masked_keys(recipe, prompt)
    kept_bytes = activation_bytes(own, tokens, mode, width, keys, rank, masked)
    on_host = trainer.activation_offload
    head = head_work(recipe, size, tokens, held)
    moments = _moments(recipe, size, held, head)
    layer = moments.layer + layer_work_bytes(own, tokens, mode, width, keys, rank, masked)
    in_layer = max(0, layer - moments.loss)
    in_forward = max(0, moments.forward - moments.loss - in_layer)
    parts = [
        Part(
            "activations",
            kept_bytes,
            f"{tokens:,} tokens, {size.layers} layers, checkpointing {mode} keeps {kept}",
            samples=False,
            host=on_host,
        ),
        Part(
            "logits",
            head.logits,
            f"{head.tables:g} tables x {head.chunk:,} positions x {head.columns:,} x 4 bytes",
            samples=False,
        ),
        Part(
            "head's gradient",
            head.gradient,
            f"{size.vocabulary:,} x {size.hidden:,} x 4 bytes, and the share that is added to it",
            samples=False,
        ),
        Part(
            "backward pass of a layer",
            in_layer,
            f"{layer:,} bytes, minus the memory of the logits and the head, which the backward"
            " pass of the loss has freed",
            samples=False,
        ),
        Part(
            "forward pass of the head",
            in_forward,
            f"{moments.forward:,} bytes, minus the memory of the backward passes, which is not"
            " allocated yet",
            samples=False,
        ),
        Part(
            "sampler's logits",
            FORWARD_TABLES * 4 * running * size.vocabulary,
            f"{FORWARD_TABLES} tables x {running} sequences x {size.vocabulary:,} x 4 bytes",
            trains=False,
        ),
    ]
    if held.context > 1:
        parts.append(_gathered_keys(own, microbatch_tokens(recipe, prompt)))
    if on_host:
        # Activations of the running layer are on the device. The last norm is in no layer.
        once = kept_bytes // max(1, size.layers)
        says = "of one layer at a time: trainer.activation_offload"
        parts.insert(1, Part("activations on the GPU", once, says, samples=False))
    if held.packed:
        parts.append(Part("values of a matrix", _values(size), "one NF4 matrix in bfloat16"))
    if width == LOWERED:
        layers = f"of the layers ({moments.cast:,} bytes)"
        says = f"bfloat16, of the head; those {layers} are freed before the backward pass"
        if mode == "none":
            says = f"bfloat16, {layers} and of the head"
        parts.insert(
            0, Part("weights cast in a pass", moments.kept + head.cast, says, samples=False)
        )
    return tuple(parts)


def _gathered_keys(size: ModelSize, tokens: int) -> Part:
    """Gradients of the keys and values of one layer, before each rank gets its part of the sum.

    Args:
        size: sizes of one rank's layers.
        tokens: tokens of one micro-batch, on all ranks of the context group.
    """
    says = f"gradients of the keys and values of {tokens:,} tokens in one layer, float32"
    return Part("gathered keys", 2 * WEIGHTS * tokens * size.keys, says, samples=False)


def _values(size: ModelSize) -> int:
    """Bytes to compute with the largest matrix of an NF4 base: its values, and a slice of them.

    Each number of the slice has half an int32 index, its float32 value and its bfloat16 value.
    """
    largest = max((m.inputs * m.outputs for m in size.linears or ()), default=0)
    return LOWERED * largest + 8 * min(NF4_SLICE, largest)


@dataclass(frozen=True)
class _Moments:
    """Bytes at three moments of a micro-batch, without activations. One of them is the peak.

    Attributes:
        cast: bfloat16 copies of all weights of the layers.
        kept: copies that still exist in the backward pass of the loss.
        forward: in the forward pass of the head.
        loss: in the backward pass of the loss.
        layer: in the backward pass of a layer, without `layer_work_bytes`.
    """

    cast: int
    kept: int
    forward: int
    loss: int
    layer: int


def _moments(recipe: Recipe, size: ModelSize, held: Holdings, head: HeadWork) -> _Moments:
    """Bytes of casts and of the head at the three moments.

    With activation checkpointing, the casts of a layer are freed together with its results.
    Otherwise autocast keeps them until the end of the pass.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        held: counts of the numbers that the run keeps.
        head: memory of the head.
    """
    lowered = number_width(recipe) == LOWERED
    # Shards are gathered in bfloat16: there is nothing to cast.
    gathered = held.shards > 1 and not held.adapter  # in the dtype of products
    others = 0 if held.lowered or held.packed or gathered else size.parameters - size.table
    cast = LOWERED * (others + held.adapter) if lowered else 0
    all_kept = recipe.trainer.activation_checkpointing == "none"
    kept, each = (cast, cast) if all_kept else (0, cast // max(1, size.layers))
    return _Moments(
        cast=cast,
        kept=kept,
        forward=cast + head.cast + head.forward,
        loss=kept + head.cast + head.logits + head.gradient,
        layer=each + head.waiting,
    )
