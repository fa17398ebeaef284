"""Resolve a recipe before anything is loaded: sizes, counts, bounds and contradictions. No torch.

The recipe is what the user requested. The Plan is what it resolves to. A number that depends on
weights or data that are not available is None, never a guess. `recipe/explain/` shows the plan as
text.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..algorithm.method import Method
from ..errors import UserError
from ..sizing.held import checkpoint_bytes, holdings
from ..sizing.kv_cache import token_bytes, whole_blocks
from ..sizing.work import record_bytes
from .algorithm_plan import check_algorithm, resolve_algorithm
from .checks import check_lora, check_sections
from .model_shape import ModelShape, model_shape
from .schema import DataConfig, EngineConfig, EvalConfig, Recipe, RolloutConfig, TrainerConfig

SFT_PROBE_EVERY = 10
"""SFT steps between evaluations of the probe set, which may end the warm-up."""
TRAINING_BYTES_PER_PARAMETER = 16
"""Bytes of float32 weights, gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Plan:
    """Values that follow from a recipe. Token counts are upper bounds.

    A value that is not known until the model is loaded is None.

    Attributes:
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


def make_plan(recipe: Recipe, *, own_reward: bool = False) -> Plan:
    """Resolve a recipe.

    Args:
        own_reward: True if a function given from Python replaces its rewards.

    Raises:
        UserError: if its settings contradict each other or the model's files.
    """
    algorithm = resolve_algorithm(recipe.algorithm)
    check_lora(recipe, algorithm)
    check_algorithm(recipe, algorithm, own_reward=own_reward)
    check_sections(recipe, algorithm)
    model = model_shape(recipe.model)
    prompt, longest = _lengths(recipe, model.context)
    trajectories = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    microbatches, step_tokens = trajectories, None
    if prompt is not None:
        lengths = recipe.trainer, recipe.rollout, prompt, recipe.episode_tokens
        microbatches, step_tokens = microbatch_bound(*lengths), _step_tokens(*lengths)
    kv_tokens = _kv_tokens(recipe.engine, longest)
    cached = model.cached
    if model.size is not None:
        cached = model.size.cached(padded=recipe.run.device != "cpu")
    width, kv_dtype = recipe.run.product_bytes, recipe.engine.kv_dtype
    each = None if cached is None else token_bytes(cached, width, kv_dtype)
    if each is not None and model.size is not None:
        each += record_bytes(recipe.moe.routing, model.size.experts)
    held = None if model.size is None else holdings(recipe, model.size)
    trained = None if recipe.model.lora.rank else model.parameters
    return Plan(
        recipe=recipe,
        algorithm=algorithm,
        model=model,
        trajectories=trajectories,
        longest_tokens=longest,
        max_prompt_tokens=prompt,
        microbatches=microbatches,
        step_tokens=step_tokens,
        kv_tokens=kv_tokens,
        kv_blocks=None if kv_tokens is None else kv_tokens // recipe.engine.block_size,
        kv_bytes=None if kv_tokens is None or each is None else kv_tokens * each,
        keeps_reference=algorithm.needs_reference,
        evaluations=_evaluations(recipe.run.steps, recipe.eval, recipe.data),
        checkpoint_bytes=checkpoint_bytes(recipe.trainer, held, trained),
    )


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


def _kv_tokens(engine: EngineConfig, longest: int | None) -> int | None:
    """Size of the KV cache, in tokens, rounded up to whole blocks."""
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


def microbatch_bound(trainer: TrainerConfig, rollout: RolloutConfig, prompt: int, new: int) -> int:
    """Maximum number of micro-batches in a step.

    Micro-batches are filled in order. The result is the smaller of two bounds.

    The first bound: each micro-batch holds at least budget // longest trajectories. The second
    applies if completions share their prompt. Every micro-batch except the last holds more than
    budget - longest tokens. Together they hold every completion, every prompt, and one more prompt
    for each place where a group is split.

    Args:
        trainer: sets the budget of a micro-batch, and whether completions share their prompt.
        rollout: sets the number of prompts and samples.
        prompt: longest prompt, in tokens.
        new: longest completion or rest of an episode, in tokens.
    """
    budget = trainer.max_tokens_per_microbatch
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    longest = prompt + new
    bound = -(-prompts * samples // max(1, budget // longest))
    room = budget - longest + 1 - prompt
    if trainer.share_prefix and room > 0:
        bound = min(bound, 1 + prompts * (prompt + samples * new) // room)
    return bound


def _step_tokens(trainer: TrainerConfig, rollout: RolloutConfig, prompt: int, new: int) -> int:
    """Tokens in the forward passes of one step: all completions, and the prompts.

    A shared prompt counts once per group, otherwise once per sample. A group that is split over two
    micro-batches is not counted twice.
    """
    copies = 1 if trainer.share_prefix else rollout.samples_per_prompt
    return rollout.prompts_per_step * (copies * prompt + rollout.samples_per_prompt * new)


def _evaluations(steps: int, config: EvalConfig, data: DataConfig) -> int:
    """Number of held-out evaluations.

    There is one before the first RL step, one every `eval.every` steps, and one after the last.
    """
    if data.heldout == 0 and not data.heldout_splits:
        return 0
    between = (steps - 1) // config.every if config.every and steps else 0
    return 1 + between + (1 if steps else 0)
