"""Memory that is used for one micro-batch or for sampling, and freed afterwards. No torch.

Activations, logits, casts, routers of experts, and layers that a rank gathers. docs/memory.md
explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.schema import Recipe
from .held import LOWERED, WEIGHTS, Holdings, Part
from .layers import ExpertSize
from .model_size import ModelSize

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
AHEAD = 2
"""Layers that are whole at the same time: one is computed while the next one is gathered."""
INDEX, PACKED = 8, 2
"""Bytes of an expert's index in PyTorch, and of a recorded expert in a packed row."""
EXCHANGED = 2
"""Tables of tokens that exist while a layer exchanges them: those sent, and those received."""

TrainingPart = partial(Part, samples=False)
"""Memory that is allocated only while the trainer works."""


@dataclass(frozen=True)
class TrainingPass:
    """Forward and backward pass of the largest micro-batch, on one rank.

    Attributes:
        tokens: tokens that the rank computes.
        width: bytes per number in products: 2 under autocast to bfloat16, otherwise 4.
        mode: activation checkpointing: none, selective or full.
        keys: keys and values that attention keeps per token. Those of a shared prompt count once
            per completion.
        masked: keys in the mask of one query, on a CPU. There, attention runs in several calls: it
            keeps their masks, and a copy of their results in one row. 0: on a GPU.
        rank: rank of LoRA adapters. 0: none. The adapters' inputs are kept instead of those of the
            frozen products. Under autocast the adapter of o_proj keeps a cast of its own.
        row: tokens of the micro-batch on all ranks of the context group.
        chunk: positions of one table of logits, if the table is not too large.
        tiled: `trainer/tiled_head.py` computes a head with a large vocabulary.
        offloaded: activations are in host memory.
    """

    tokens: int
    width: int
    mode: str = "none"
    keys: float = 1.0
    masked: int = 0
    rank: int = 0
    row: int = 0
    chunk: int = 1
    tiled: bool = False
    offloaded: bool = False

    @property
    def lowered(self) -> bool:
        """True under autocast to bfloat16."""
        return self.width == LOWERED

    @property
    def on_gpu(self) -> bool:
        return not self.masked


def training_pass(recipe: Recipe, prompt: int | None, context: int = 1) -> TrainingPass:
    """The largest micro-batch of a run.

    Args:
        recipe: the whole run.
        prompt: longest prompt, in tokens. None: not known.
        context: ranks of a context group.
    """
    trainer, rollout, new = recipe.trainer, recipe.rollout, recipe.episode_tokens
    prompt, samples = prompt or 0, rollout.samples_per_prompt
    sequence = prompt + new
    # A trajectory longer than the budget gets a micro-batch to itself.
    row = max(trainer.max_tokens_per_microbatch, sequence)
    keys = 1.0
    if trainer.share_prefix:
        keys = (prompt + samples * sequence) / (prompt + samples * new)
    if context > 1:
        # Attention keeps all keys that the rank's queries see. A rank computes a part of at most
        # two sequences, of which it needs earlier keys too: less than one whole sequence more.
        keys += context * sequence / row
    width, on_cpu = recipe.run.product_bytes, recipe.run.device == "cpu"
    truncates = rollout.top_p < 1 or rollout.top_k or rollout.min_p
    entropy = resolve_algorithm(recipe.algorithm).entropy_in_loss
    return TrainingPass(
        tokens=-(-row // context),
        width=width,
        mode=trainer.activation_checkpointing,
        keys=keys,
        masked=sequence if on_cpu else 0,
        rank=recipe.model.lora.rank,
        row=row,
        chunk=trainer.logprob_chunk,
        tiled=on_cpu and width == WEIGHTS and not truncates and not entropy,
        offloaded=trainer.activation_offload,
    )


def layer_bytes(size: ModelSize, one: TrainingPass) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    The residual stream is float32, and both norms keep it. Matrix products keep their inputs in the
    dtype of the products. Under autocast, q, k, v, gate and up each have their own cast of the
    input. Attention keeps q, k, v, its result, and one float32 number per head.
    """
    inputs = 5 if one.lowered else 2
    products = (
        inputs * size.hidden + 2 * size.queries + 2 * one.keys * size.keys + 4 * size.intermediate
    )
    if one.rank:
        products += ADAPTERS * one.rank + (size.queries if one.lowered else 0)
    if one.masked:
        products += one.masked + size.queries
    normed = size.queries + size.keys if size.head_norms else 0
    return 4 * (2 * size.hidden + size.heads + 2 + normed) + one.width * products


def kept_results(size: ModelSize, one: TrainingPass) -> float:
    """Bytes per token that selective checkpointing keeps of one layer.

    They are the results of matrix products and of attention. Each LoRA adapter has two products.
    """
    products = size.queries + 2 * size.keys + 2 * size.hidden + 2 * size.intermediate
    adapters = products + ADAPTERS * one.rank if one.rank else 0
    return one.width * (products + adapters + size.queries) + 4 * size.heads


def activation_bytes(size: ModelSize, one: TrainingPass) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    entrance = 4 * size.hidden
    layer: float = entrance
    if one.mode == "none":
        layer = layer_bytes(size, one)
    elif one.mode == "selective":
        layer += kept_results(size, one)
    return int(one.tokens * (size.layers * layer + 2 * entrance))


def layer_work_bytes(size: ModelSize, one: TrainingPass) -> int:
    """Bytes that the backward pass of one layer needs in addition to what was kept.

    These are the recomputed results and three gradients of MLP width. The product of gate and up is
    freed by then, because its last reader was the down projection. The net is two tensors of MLP
    width.
    """
    again = 0.0 if one.mode == "none" else layer_bytes(size, one)
    if one.mode == "selective":  # these are not recomputed
        again -= one.width * (2 * size.intermediate + size.queries + size.keys)
    return int(one.tokens * (again + 2 * one.width * size.intermediate))


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


def head_work(size: ModelSize, held: Holdings, one: TrainingPass) -> HeadWork:
    """Memory of the output head in a training pass.

    Tables with more than SMALL logits are computed by `trainer/fused_head.py`, one at a time, on a
    GPU with a bfloat16 cast, or on a CPU in tiles. Smaller ones are left to autograd.
    """
    chunk = max(1, min(one.chunk, TABLE // size.vocabulary))
    table = 4 * chunk * size.vocabulary
    weight = 4 * size.table
    frozen = held.adapter > 0
    waiting = 0 if frozen or not size.tied else weight
    if min(chunk, one.tokens) * size.vocabulary <= SMALL:
        gradient = 0 if frozen else 2 * weight
        forward = FORWARD_TABLES * table
        tables = BACKWARD_TABLES, BACKWARD_TABLES * table
        return HeadWork(chunk, size.vocabulary, *tables, forward, 0, gradient, waiting)
    if one.tiled and size.vocabulary > TILE_COLUMNS:
        rows = min(TILE_ROWS, one.tokens)
        tile = 4 * rows * TILE_COLUMNS
        # With one rank the gradient is added to that of the embedding or the head itself.
        alone = held.groups.ranks == 1 or frozen
        gradient, waiting = (0, 0) if alone else (weight, waiting)
        return HeadWork(rows, TILE_COLUMNS, 1, tile, tile, 0, gradient, waiting)
    count = 1.5 if one.lowered and one.on_gpu else 1.0
    cast = (LOWERED * size.table if one.on_gpu else weight) if one.lowered else 0
    stored = held.lowered == held.matrices or (held.lowered > 0 and not size.tied)
    if one.on_gpu and stored:
        cast = 0  # the head is stored in bfloat16
    gradient = 0 if frozen else weight + min(4 * SLICE, weight)
    forward = table + 2 * min(table, 4 * ENTROPY_TABLE)
    logits = int(count * table)
    return HeadWork(chunk, size.vocabulary, count, logits, forward, cast, gradient, waiting)


def work_parts(
    recipe: Recipe, size: ModelSize, held: Holdings, prompt: int | None, longest: int | None
) -> tuple[Part, ...]:
    """Memory that is allocated for a micro-batch, or for sampling, and freed afterwards.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        held: counts of the numbers that the run keeps.
        prompt: longest prompt, in tokens. None: not known.
        longest: longest sequence, in tokens. None: not known.
    """
    one = training_pass(recipe, prompt, held.groups.context)
    running, rollout = recipe.engine.max_running, recipe.rollout
    parts = [
        *_gathered_layers(size, held, one),
        *_pass_parts(size, held, one),
        Part(
            "sampler's logits",
            FORWARD_TABLES * 4 * running * size.vocabulary,
            f"{FORWARD_TABLES} tables x {running} sequences x {size.vocabulary:,} x 4 bytes",
            trains=False,
        ),
    ]
    if held.groups.context > 1:
        # Before each rank gets its part of the sum.
        each = 2 * WEIGHTS * size.in_group(held.groups.tensor).keys
        says = f"gradients of the keys and values of {one.row:,} tokens in one layer, float32"
        parts.append(TrainingPart("gathered keys", one.row * each, says))
    if held.packed:
        parts.append(Part("values of a matrix", _values(size), "one NF4 matrix in bfloat16"))
    if size.experts is None:
        return tuple(parts)
    parts += _expert_parts(size, size.experts, held, one, recipe.moe.routing)
    if record := record_bytes(recipe.moe.routing, size.experts):
        count, tokens = rollout.prompts_per_step * rollout.samples_per_prompt, longest or 0
        says = f"{count:,} trajectories x {tokens:,} tokens x {record} bytes"
        parts.append(Part("experts of the samples", count * tokens * record, says, host=True))
    return tuple(parts)


def _pass_parts(size: ModelSize, held: Holdings, one: TrainingPass) -> list[Part]:
    """Activations, logits and casts of a training pass."""
    kept = {
        "none": "all inputs of a layer",
        "selective": "a layer's input and its products",
        "full": "a layer's input",
    }[one.mode]
    own = size.in_group(held.groups.tensor)
    kept_bytes = activation_bytes(own, one)
    head = head_work(size, held, one)
    moments = _moments(size, held, head, one)
    layer = moments.layer + layer_work_bytes(own, one)
    in_layer = max(0, layer - moments.loss)
    in_forward = max(0, moments.forward - moments.loss - in_layer)
    parts = []
    if one.lowered:
        layers = f"of the layers ({moments.cast:,} bytes)"
        says = f"bfloat16, of the head; those {layers} are freed before the backward pass"
        if one.mode == "none":
            says = f"bfloat16, {layers} and of the head"
        parts.append(TrainingPart("weights cast in a pass", moments.kept + head.cast, says))
    says = f"{one.tokens:,} tokens, {size.layers} layers, checkpointing {one.mode} keeps {kept}"
    parts.append(TrainingPart("activations", kept_bytes, says, host=one.offloaded))
    if one.offloaded:
        # Activations of the running layer are on the device. The last norm is in no layer.
        once = kept_bytes // max(1, size.layers)
        says = "of one layer at a time: trainer.activation_offload"
        parts.append(TrainingPart("activations on the GPU", once, says))
    return [
        *parts,
        TrainingPart(
            "logits",
            head.logits,
            f"{head.tables:g} tables x {head.chunk:,} positions x {head.columns:,} x 4 bytes",
        ),
        TrainingPart(
            "head's gradient",
            head.gradient,
            f"{size.vocabulary:,} x {size.hidden:,} x 4 bytes, and the share that is added to it",
        ),
        TrainingPart(
            "backward pass of a layer",
            in_layer,
            f"{layer:,} bytes, minus the memory of the logits and the head, which the backward"
            " pass of the loss has freed",
        ),
        TrainingPart(
            "forward pass of the head",
            in_forward,
            f"{moments.forward:,} bytes, minus the memory of the backward passes, which is not"
            " allocated yet",
        ),
    ]


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


def _moments(size: ModelSize, held: Holdings, head: HeadWork, one: TrainingPass) -> _Moments:
    """Bytes of casts and of the head at the three moments.

    With activation checkpointing, the casts of a layer are freed together with its results.
    Otherwise autocast keeps them until the end of the pass.
    """
    # Shards are gathered in bfloat16: there is nothing to cast.
    gathered = held.groups.shards > 1 and not held.adapter
    others = 0 if held.lowered or held.packed or gathered else size.parameters - size.table
    cast = LOWERED * (others + held.adapter) if one.lowered else 0
    kept, each = (cast, cast) if one.mode == "none" else (0, cast // max(1, size.layers))
    return _Moments(
        cast=cast,
        kept=kept,
        forward=cast + head.cast + head.forward,
        loss=kept + head.cast + head.logits + head.gradient,
        layer=each + head.waiting,
    )


def _gathered_layers(size: ModelSize, held: Holdings, one: TrainingPass) -> tuple[Part, ...]:
    """Whole weights and gradients that exist on a rank for a time, in addition to its shards.

    The root (embedding, head and last norm) is whole during a forward or backward pass. A layer is
    gathered while the layer before it is computed, in the dtype of matrix products.
    """
    groups, width = held.groups, one.width
    if groups.shards == 1 or held.adapter:  # of an adapter, a rank gathers little
        return ()
    tables = size.table * (1 if size.tied else 2)
    experts = size.experts.parameters if size.experts else 0
    gathered = size.parameters - tables - experts + experts // groups.experts
    layer = gathered // max(1, size.layers) // groups.tensor
    apart = "" if groups.tensor == 1 else f", 1 / {groups.tensor} of each"
    if experts and groups.experts > 1:
        apart = f", with 1 / {groups.experts} of the experts"
    stored = LOWERED if held.lowered == held.matrices else WEIGHTS
    each = width + WEIGHTS  # in the dtype of products, and in float32 for the sum
    return (
        TrainingPart(
            "gathered weights",
            tables * stored + AHEAD * layer * width,
            f"embedding and head, {stored} bytes each; {AHEAD} layers{apart}, {width} bytes each",
        ),
        TrainingPart(
            "whole gradients",
            AHEAD * layer * each,
            f"{AHEAD} layers{apart}, {each} bytes each, before each rank keeps its part of the sum",
        ),
    )


def record_bytes(routing: str, experts: ExpertSize | None) -> int:
    """Bytes per token of the record of experts, in the KV cache and in trajectories.

    Args:
        routing: setting `moe.routing`.
        experts: expert layers of the policy. None: there are none.
    """
    return 0 if experts is None or routing == "free" else experts.record


def _expert_parts(
    size: ModelSize, experts: ExpertSize, held: Holdings, one: TrainingPass, routing: str
) -> list[Part]:
    """Memory of router logits and choices, and of tokens that ranks exchange.

    If all experts are used equally, a rank exchanges the tokens of `top_k` experts. It keeps the
    outputs that it gets back, for the gradient of their weights. With activation checkpointing it
    keeps those of one layer at a time.
    """
    choices = INDEX * experts.top_k
    each = WEIGHTS * experts.count + choices
    if routing != "free":
        each += PACKED * experts.top_k
    if routing == "replay":
        each += 2 * choices  # given choices, and those of the routers themselves
    says = f"{one.tokens:,} tokens x {experts.layers} layers x {each} bytes: logits and choices"
    parts = [TrainingPart("routers", one.tokens * experts.layers * each, says)]
    if held.groups.experts == 1:
        return parts
    kept, layers = 1, "one layer"
    if one.mode == "none":
        kept, layers = experts.layers, f"all {experts.layers} layers with experts"
    exchanged = TrainingPart(
        "exchanged tokens",
        one.tokens * experts.top_k * size.hidden * WEIGHTS * (kept + EXCHANGED),
        f"{one.tokens:,} tokens x {experts.top_k} experts x {size.hidden:,} x {WEIGHTS} bytes:"
        f" outputs of {layers}, and {EXCHANGED} tables of the running layer",
    )
    return [*parts, exchanged]
