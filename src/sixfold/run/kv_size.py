"""Size of the KV cache on the actual device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UserError
from ..model.device import free_memory
from ..model.loading import Policy
from ..recipe.schema import (
    EngineConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    TrainerConfig,
)
from ..sizing import kv_cache
from ..sizing.held import Holdings, cast_parameters, held_parts, rank_groups
from ..sizing.memory import ranks_started
from ..sizing.model_size import ModelSize, cached_numbers, expert_size, rough_size
from ..sizing.work import record_bytes, work_parts


def kv_tokens(
    recipe: Recipe,
    policy: Policy,
    longest: int,
    notes: list[str],
    draft: PreTrainedModel | None = None,
) -> int:
    """Number of tokens in the KV cache.

    It has room for `engine.max_running` sequences. On a GPU it is smaller if less fits.

    Args:
        recipe: the whole run.
        policy: on its device, together with the engine's own copy if the recipe has one.
        longest: longest sequence, in tokens.
        notes: receives a message if fewer tokens fit than `engine.max_running` sequences need.
        draft: draft model, on the same device. Its KV cache has as many tokens.

    Raises:
        UserError: if not even one sequence fits.
    """
    engine = recipe.engine
    wanted = engine.max_running * kv_cache.whole_blocks(longest, engine.block_size)
    config = text_config(policy.model)
    memory = free_memory(policy.model.device)
    per_token = _token_bytes(recipe.run, engine, recipe.moe, policy.model, draft)
    if memory is None or per_token is None:
        return wanted
    free, total = memory
    reserved = reserved_bytes(recipe, policy, config, longest) + int(kv_cache.HEADROOM * total)
    tokens = kv_cache.tokens_that_fit(free, reserved, per_token, wanted)
    tokens -= tokens % engine.block_size
    one = kv_cache.whole_blocks(longest, engine.block_size)
    if tokens < one:
        raise UserError(
            f"engine.kv_tokens = 0: one sequence of {longest} tokens needs"
            f" {one * per_token / 1e9:.1f} GB of KV cache, but training needs about"
            f" {reserved / 1e9:.1f} of the {free / 1e9:.1f} GB free. Lower"
            " rollout.max_new_tokens or trainer.max_tokens_per_microbatch, or set run.precision ="
            " 'bfloat16',"
            " engine.release_kv = true or trainer.activation_checkpointing = 'full'"
        )
    if tokens < wanted:
        notes.append(
            f"KV cache: {tokens:,} tokens ({tokens * per_token / 1e9:.1f} GB) fit beside training."
            f" engine.max_running = {engine.max_running} full-length sequences need {wanted:,}"
            f" ({wanted * per_token / 1e9:.1f} GB), so fewer run at a time."
            " engine.preemption.kind = 'recompute' admits more; engine.kv_tokens sets another size"
        )
    return tokens


def text_config(model: PreTrainedModel) -> dict[str, Any]:
    """Configuration of the language model, as JSON."""
    config: dict[str, Any] = json.loads(
        model.config.get_text_config().to_json_string(use_diff=False)
    )
    return config


def _token_bytes(
    run: RunConfig,
    engine: EngineConfig,
    moe: MoeConfig,
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
) -> int | None:
    """Bytes of one token in the KV caches of the model and its draft model. None: not known."""
    config, padded = text_config(model), model.device.type != "cpu"
    own = cached_numbers(config, padded=padded)
    if own is None:
        return None
    width = run.product_bytes
    size = kv_cache.token_bytes(own, width, engine.kv_dtype)
    size += record_bytes(moe.routing, expert_size(config))
    if draft is None:
        return size
    # The draft model's cache is never quantised.
    more = cached_numbers(text_config(draft), padded=padded)
    return None if more is None else size + more.numbers * width


def reserved_bytes(recipe: Recipe, policy: Policy, config: Mapping[str, Any], longest: int) -> int:
    """Bytes that training will need on the policy's device, in addition to the policy's weights.

    With `engine.release_kv` the KV cache is freed during training, so only memory held between
    steps counts.

    Args:
        recipe: the whole run.
        policy: on its device.
        config: the model's configuration.
        longest: longest sequence, in tokens.
    """
    size = rough_size(config, sum(p.numel() for p in policy.plain.parameters()))
    numbers = _holdings(recipe.model, recipe.trainer, recipe.parallel, policy, size)
    held = sum(p.size for p in held_parts(recipe, numbers) if not p.early and not p.host)
    if not numbers.adapter:
        # The policy is still whole at this point. Later every rank keeps only its shard.
        held -= numbers.stored - numbers.stored // numbers.groups.shards
    if recipe.engine.release_kv:
        return held
    prompt = max(0, longest - recipe.episode_tokens)
    work = work_parts(recipe, size, numbers, prompt, longest)
    return held + sum(part.size for part in work if part.trains and not part.host)


def _holdings(
    model: ModelConfig,
    trainer: TrainerConfig,
    parallel: ParallelConfig,
    policy: Policy,
    size: ModelSize,
) -> Holdings:
    """Count the parameters of a loaded policy. Those of an adapter are counted on the module."""
    base = list(policy.plain.parameters())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    lowered = sum(p.numel() for p in base if p.dtype == torch.bfloat16)
    return Holdings(
        parameters=size.parameters,
        matrices=sum(p.numel() for p in base if p.dim() > 1),
        lowered=lowered,
        trained=trained,
        cast=cast_parameters(size, trainer, lowered),
        groups=rank_groups(parallel, ranks_started()),
        critic=trained - (0 if size.tied or model.lora.rank else size.table),
    )
