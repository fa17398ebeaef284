"""Resolve a recipe before anything is loaded: sizes, counts, bounds and contradictions. No torch.

The recipe is what the user requested. The Plan is what it resolves to. A number that depends on
weights or data that are not available is None, never a guess. `recipe/explain/` shows the plan as
text.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..algorithm.method import Method
from ..environment.episodes import NOT_COPIED, library_of
from ..errors import UserError
from .adapter_folder import loaded_from
from .algorithm_plan import check_algorithm, resolve_algorithm
from .backend_checks import check_backend
from .kv_budget import CachedNumbers, token_bytes
from .memory_checks import check_memory_settings
from .memory_experts import record_bytes
from .memory_held import checkpoint_bytes
from .memory_part import number_width
from .model_size import ModelSize, cached_numbers, model_size, read_size
from .schema import Recipe, ScratchConfig

SCRATCH_SPECIAL_TOKENS = 6
"""Tokens of the character tokenizer in addition to the alphabet.

Equal to the number of `model.scratch.SPECIAL` tokens, which cannot be imported without torch.
"""

SFT_PROBE_EVERY = 10
"""SFT steps between evaluations of the probe set, which may end the warm-up."""
TRAINING_BYTES_PER_PARAMETER = 16
"""Bytes of float32 weights, gradient and AdamW's two moments."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model according to its files. None: not known before the model is loaded.

    Attributes:
        origin: description of where the model comes from.
        parameters: number of parameters, tied weights counted once.
        context: longest sequence, in tokens.
        cached: what the KV cache keeps of one token, if `size` is not known.
        size: sizes of the parts.
        unknown: why `size` is not known.
    """

    origin: str
    parameters: int | None = None
    context: int | None = None
    cached: CachedNumbers | None = None
    size: ModelSize | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Plan:
    """Values that follow from a recipe. Token counts are upper bounds.

    A value that is not known until the model is loaded is None.

    Attributes:
        recipe: the recipe.
        algorithm: the resolved method.
        model: sizes of the model.
        trajectories: trajectories per step.
        longest_tokens: longest prompt and completion together, in tokens.
        max_prompt_tokens: longest prompt: the tokens that the completion leaves.
        microbatches: maximum number per step.
        step_tokens: maximum number of tokens in the forward passes of one step.
        kv_tokens: size of the engine's KV cache, in tokens.
        kv_blocks: size of the engine's KV cache, in blocks.
        kv_bytes: size of the engine's KV cache, in bytes.
        keeps_reference: True if the algorithm needs a reference model.
        evaluations: held-out evaluations in the RL run.
        checkpoint_bytes: approximate size of one checkpoint, in bytes.
    """

    recipe: Recipe
    algorithm: Method
    model: ModelShape
    trajectories: int
    longest_tokens: int | None
    max_prompt_tokens: int | None
    microbatches: int
    step_tokens: int | None
    kv_tokens: int | None
    kv_blocks: int | None
    kv_bytes: int | None
    keeps_reference: bool
    evaluations: int
    checkpoint_bytes: int | None


def make_plan(recipe: Recipe) -> Plan:
    """Resolve a recipe.

    Raises:
        UserError: if its settings contradict each other or the model's files.
    """
    algorithm = resolve_algorithm(recipe.algorithm)
    check_algorithm(recipe, algorithm)
    _check_eval(recipe)
    _check_keep_best(recipe)
    _check_truncation(recipe, algorithm)
    _check_branches(recipe)
    _check_batching(recipe)
    _check_graphs(recipe)
    check_backend(recipe)
    check_memory_settings(recipe)
    model = model_shape(recipe)
    prompt, longest = _lengths(recipe, model.context)
    trajectories = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    kv_tokens = _kv_tokens(recipe, longest)
    cached = model.cached
    if model.size is not None:
        cached = model.size.cached(padded=recipe.run.device != "cpu")
    each = None if cached is None else kv_token_bytes(recipe, cached)
    if each is not None and model.size is not None:
        each += record_bytes(recipe, model.size.experts)
    return Plan(
        recipe=recipe,
        algorithm=algorithm,
        model=model,
        trajectories=trajectories,
        longest_tokens=longest,
        max_prompt_tokens=prompt,
        microbatches=trajectories if prompt is None else microbatch_bound(recipe, prompt),
        step_tokens=None if prompt is None else _step_tokens(recipe, prompt),
        kv_tokens=kv_tokens,
        kv_blocks=None if kv_tokens is None else kv_tokens // recipe.engine.block_size,
        kv_bytes=None if kv_tokens is None or each is None else kv_tokens * each,
        keeps_reference=algorithm.needs_reference,
        evaluations=_evaluations(recipe),
        checkpoint_bytes=checkpoint_bytes(recipe, model.size, model.parameters),
    )


def _check_eval(recipe: Recipe) -> None:
    if recipe.eval.samples > 1 and recipe.eval.temperature == 0:
        raise UserError(
            f"eval.samples = {recipe.eval.samples} has no effect at eval.temperature = 0: every"
            " sample is the same greedy answer. Set eval.temperature > 0 or eval.samples = 1"
        )


def _check_keep_best(recipe: Recipe) -> None:
    kept, data = recipe.checkpoint.keep_best, recipe.data
    if kept and not (recipe.eval.every and (data.heldout or data.heldout_splits)):
        raise UserError(
            f"checkpoint.keep_best = {kept} needs held-out evaluations during training: set"
            " eval.every and data.heldout, or checkpoint.keep_best = 0"
        )


def _check_batching(recipe: Recipe) -> None:
    """Chunks would close a static batch early, and its cost would be that of a smaller batch."""
    if recipe.engine.chunked_prefill and not recipe.engine.continuous:
        raise UserError(
            "engine.chunked_prefill = true needs engine.continuous = true: a static batch starts"
            " with whole prompts. Set one of them to its default"
        )


def _check_graphs(recipe: Recipe) -> None:
    """Refuse CUDA graphs where every decode step would run without them."""
    if recipe.engine.cuda_graphs != "on" or recipe.rollout.backend.kind != "engine":
        return
    if recipe.moe.routing != "free":
        raise UserError(
            "engine.cuda_graphs = 'on' has no effect with moe.routing ="
            f" '{recipe.moe.routing}': a captured forward pass cannot record the experts of its"
            " tokens. Use engine.cuda_graphs = 'auto', or moe.routing = 'free'"
        )
    if recipe.model.lora.rank and recipe.sync.kind == "shared":
        raise UserError(
            "engine.cuda_graphs = 'on' has no effect with model.lora.rank ="
            f" {recipe.model.lora.rank}: the engine adds the adapter without graphs. Use"
            " engine.cuda_graphs = 'auto', or sync.kind = 'copy', which merges the adapter"
        )


def _check_branches(recipe: Recipe) -> None:
    """Refuse branches that would never part, or that would change the number of samples."""
    rollout = recipe.rollout
    if rollout.branches == 1:
        return
    if not recipe.environment.episode:
        raise UserError(
            f"rollout.branches = {rollout.branches} shares the first turns of an episode, but"
            " environment.episode is not set. Set it, or use rollout.branches = 1"
        )
    episode = recipe.environment.episode
    if episode in NOT_COPIED or library_of(episode):
        raise UserError(
            f"rollout.branches = {rollout.branches} copies episodes, but those of"
            f" environment.episode = {episode!r} cannot be copied. Use rollout.branches = 1"
        )
    if rollout.branch_turn >= rollout.max_turns:
        raise UserError(
            f"rollout.branch_turn = {rollout.branch_turn} is never reached: an episode ends after"
            f" rollout.max_turns = {rollout.max_turns} replies. Lower it, or raise"
            " rollout.max_turns"
        )
    for name in ("samples_per_prompt", "oversample"):
        if getattr(rollout, name) % rollout.branches:
            raise UserError(
                f"rollout.{name} = {getattr(rollout, name)} must be a multiple of rollout.branches"
                f" = {rollout.branches}, so that every sample has a trunk to share. Change one of"
                " them"
            )


def _check_truncation(recipe: Recipe, algorithm: Method) -> None:
    top_k = recipe.rollout.top_k
    if top_k == 1:
        raise UserError(
            "rollout.top_k = 1 leaves only one token: its log-prob is 0 for all weights, so"
            " there is no gradient. Use at least 2, or 0 for all tokens"
        )
    if top_k and algorithm.entropy_target >= math.log(top_k):
        raise UserError(
            f"algorithm.entropy_target = {algorithm.entropy_target:g} nats cannot be reached:"
            f" with rollout.top_k = {top_k} the entropy is at most ln {top_k} ="
            f" {math.log(top_k):.3g}. Lower it, or raise rollout.top_k"
        )


def model_shape(recipe: Recipe, setting: str = "model.path") -> ModelShape:
    """Sizes of the recipe's model, from its settings or its files. Nothing is loaded or downloaded.

    Args:
        recipe: recipe with the model.
        setting: setting that names the model, for error messages.

    Raises:
        UserError: if the settings or the files are invalid.
    """
    if not recipe.model.path:
        return _scratch_shape(recipe.model.scratch)
    path, revision = loaded_from(recipe.model.path, recipe.model.revision, setting)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _local_shape(folder)
    if folder.exists():
        raise UserError(f"{setting}: {folder} is a file; give the folder that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
        raise UserError(f"{setting}: no folder {folder}, and '{path}' is not a hub id (owner/name)")
    return _hub_shape(path, revision)


def _scratch_shape(sizes: ScratchConfig) -> ModelShape:
    if sizes.head_dim % 2:
        raise UserError(
            f"model.scratch.head_dim = {sizes.head_dim} is odd, but rotary embeddings rotate"
            " pairs of numbers. Use an even number"
        )
    repeated = sorted({c for c in sizes.alphabet if sizes.alphabet.count(c) > 1})
    if repeated:
        raise UserError(
            f"model.scratch.alphabet has repeated characters: {''.join(repeated)!r}. List every"
            " character once"
        )
    vocabulary = len(sizes.alphabet) + SCRATCH_SPECIAL_TOKENS
    if sizes.words:
        vocabulary += len(sizes.words) + 1  # and the token of tool results
    size = model_size(
        {
            "model_type": "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "tie_word_embeddings": True,
        }
    )
    assert size is not None
    return ModelShape(
        origin=(
            f"Qwen3 architecture from scratch: {sizes.layers} layers, width {sizes.hidden_size},"
            f" {vocabulary} tokens in the vocabulary"
        ),
        parameters=size.parameters,
        context=sizes.context,
        size=size,
    )


def _hub_shape(name: str, revision: str) -> ModelShape:
    """Sizes of a model on the hub.

    They are read from its config.json, if an earlier download left it in the hub's cache.
    """
    shape = ModelShape(origin=f"{name} from the hub")
    kept = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    )
    folder = Path(kept).expanduser() / ("models--" + name.replace("/", "--"))
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision  # a revision may be a commit
    try:
        path = folder / "snapshots" / commit / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return shape
    size, unknown = _size_or_reason(config)
    if size is None:
        return replace(shape, unknown=unknown)
    return replace(shape, parameters=size.parameters, size=size)


def _size_or_reason(config: object) -> tuple[ModelSize | None, str]:
    """Sizes of a model, or the reason why they are not known."""
    try:
        return read_size(config), ""
    except UserError as error:
        return None, str(error)


def _local_shape(folder: Path) -> ModelShape:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"model.path: {folder} has no config.json. Give a Hugging Face model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model.path: {folder / 'config.json'} must hold an object, with sizes")
    size, unknown = _size_or_reason(config)
    inner = config.get("text_config")
    config = config if inner is None else inner
    if not isinstance(config, dict):
        raise UserError(
            f"model.path: {folder / 'config.json'}: text_config must be an object, with sizes"
        )
    kind = config.get("model_type", "unknown")
    return ModelShape(
        origin=f"{kind} model in {folder}",
        parameters=_stored_parameters(folder) if size is None else size.parameters,
        context=config.get("max_position_embeddings", config.get("n_positions")),
        cached=cached_numbers(config, padded=True),
        size=size,
        unknown=unknown,
    )


def kv_token_bytes(recipe: Recipe, cached: CachedNumbers) -> int:
    """Bytes of the keys and values of one token in the engine's cache.

    Args:
        recipe: sets the dtype of the cache.
        cached: what the cache keeps of one token.
    """
    return token_bytes(cached, number_width(recipe), recipe.engine.kv_dtype)


def _stored_parameters(folder: Path) -> int | None:
    """Number of parameters in the folder's safetensors files, or None if there are none.

    They are read from the headers: 8 bytes of length, then JSON.
    """
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for path in files:
        with path.open("rb") as stream:
            head = stream.read(8)
            size = int.from_bytes(head, "little")
            if len(head) < 8 or size > path.stat().st_size:
                raise UserError(
                    f"model.path: {path} is not a complete safetensors file. Download or save it"
                    " again"
                )
            header = json.loads(stream.read(size))
        total += sum(
            math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
        )
    return total if files else None


def _lengths(recipe: Recipe, context: int | None) -> tuple[int | None, int | None]:
    """(longest prompt, longest prompt plus completion), in tokens."""
    prompt, new = recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens
    owner = "model.scratch.context" if not recipe.model.path else "its config.json"
    if context is not None and new >= context:
        raise UserError(
            f"rollout.max_new_tokens = {new} leaves no room for a prompt in the model's context of"
            f" {context} tokens ({owner})"
        )
    if context is not None and prompt + new > context:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + {new} = {prompt + new}"
            f" exceeds the model's context of {context} tokens ({owner})"
        )
    if prompt:
        longest = prompt + recipe.episode_tokens
        return prompt, longest if context is None else min(context, longest)
    return (None, None) if context is None else (context - new, context)


def _kv_tokens(recipe: Recipe, longest: int | None) -> int | None:
    """Size of the KV cache, in tokens, rounded up to whole blocks."""
    engine = recipe.engine
    if engine.kv_tokens:
        if longest is not None and engine.kv_tokens < longest:
            raise UserError(
                f"engine.kv_tokens = {engine.kv_tokens} is less than one sequence of up to"
                f" {longest} tokens. Use at least {longest}, or 0 to compute it, or lower"
                " data.max_prompt_tokens"
            )
        return whole_blocks(engine.kv_tokens, engine.block_size)
    return (
        None if longest is None else engine.max_running * whole_blocks(longest, engine.block_size)
    )


def whole_blocks(tokens: int, block: int) -> int:
    """A number of tokens, rounded up to a multiple of the block size."""
    return -(-tokens // block) * block


def microbatch_bound(recipe: Recipe, prompt: int) -> int:
    """Maximum number of micro-batches in a step if no prompt is longer than `prompt` tokens.

    Micro-batches are filled in order. The result is the smaller of two bounds.

    The first bound: each micro-batch holds at least budget // longest trajectories. The second
    applies if completions share their prompt. Every micro-batch except the last holds more than
    budget - longest tokens. Together they hold every completion, every prompt, and one more prompt
    for each place where a group is split.
    """
    budget, new = recipe.trainer.max_tokens_per_microbatch, recipe.episode_tokens
    prompts, samples = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    longest = prompt + new
    bound = -(-prompts * samples // max(1, budget // longest))
    room = budget - longest + 1 - prompt
    if recipe.trainer.share_prefix and room > 0:
        bound = min(bound, 1 + prompts * (prompt + samples * new) // room)
    return bound


def _step_tokens(recipe: Recipe, prompt: int) -> int:
    """Tokens in the forward passes of one step: all completions, and the prompts.

    A shared prompt counts once per group, otherwise once per sample. A group that is split over two
    micro-batches is not counted twice.
    """
    rollout = recipe.rollout
    copies = 1 if recipe.trainer.share_prefix else rollout.samples_per_prompt
    return rollout.prompts_per_step * (
        copies * prompt + rollout.samples_per_prompt * recipe.episode_tokens
    )


def _evaluations(recipe: Recipe) -> int:
    """Number of held-out evaluations.

    There is one before the first RL step, one every `eval.every` steps, and one after the last.
    """
    if recipe.data.heldout == 0 and not recipe.data.heldout_splits:
        return 0
    steps, every = recipe.run.steps, recipe.eval.every
    between = (steps - 1) // every if every and steps else 0
    return 1 + between + (1 if steps else 0)
