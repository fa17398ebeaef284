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
from ..recipe import kv_budget
from ..recipe.memory_experts import expert_parts, record_bytes
from ..recipe.memory_held import Holdings, cast_parameters, held_parts
from ..recipe.memory_part import number_width
from ..recipe.memory_shards import gathered_parts, ranks_started
from ..recipe.memory_work import rank_tokens, work_parts
from ..recipe.model_size import ModelSize, cached_numbers, expert_size, rough_size
from ..recipe.plan import kv_token_bytes
from ..recipe.schema import Recipe


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
    wanted = kv_budget.wanted_tokens(engine.max_running, longest, engine.block_size)
    config = _config(policy.model)
    memory, per_token = free_memory(policy.model.device), _token_bytes(recipe, policy.model, draft)
    if memory is None or per_token is None:
        return wanted
    free, total = memory
    reserved = reserved_bytes(recipe, policy, config, longest) + int(kv_budget.HEADROOM * total)
    tokens = kv_budget.tokens_that_fit(free, reserved, per_token, wanted)
    tokens -= tokens % engine.block_size
    one = kv_budget.wanted_tokens(1, longest, engine.block_size)
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


def _config(model: PreTrainedModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        model.config.get_text_config().to_json_string(use_diff=False)
    )
    return config


def _token_bytes(
    recipe: Recipe, model: PreTrainedModel, draft: PreTrainedModel | None
) -> int | None:
    """Bytes of one token in the KV caches of the model and its draft model. None: not known."""
    config, padded = _config(model), model.device.type != "cpu"
    own = cached_numbers(config, padded=padded)
    if own is None:
        return None
    size = kv_token_bytes(recipe, own) + record_bytes(recipe, expert_size(config))
    if draft is None:
        return size
    # The draft model's cache is never quantised.
    more = cached_numbers(_config(draft), padded=padded)
    return None if more is None else size + more.numbers * number_width(recipe)


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
    numbers = _holdings(recipe, policy, size)
    held = sum(p.size for p in held_parts(recipe, numbers) if not p.early and not p.host)
    if not numbers.adapter:
        # The policy is still whole at this point. Later every rank keeps only its shard.
        held -= numbers.stored - numbers.stored // numbers.shards
    if recipe.engine.release_kv:
        return held
    prompt = max(0, longest - recipe.episode_tokens)
    tokens = rank_tokens(recipe, prompt, numbers)
    work = [
        *work_parts(recipe, size, prompt, numbers),
        *gathered_parts(recipe, size, numbers),
        *expert_parts(recipe, size, tokens, longest, numbers.experts),
    ]
    return held + sum(part.size for part in work if part.trains and not part.host)


def _holdings(recipe: Recipe, policy: Policy, size: ModelSize) -> Holdings:
    """Count the parameters of a loaded policy. Those of an adapter are counted on the module."""
    base = list(policy.plain.parameters())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    lowered = sum(p.numel() for p in base if p.dtype == torch.bfloat16)
    return Holdings(
        parameters=size.parameters,
        matrices=sum(p.numel() for p in base if p.dim() > 1),
        lowered=lowered,
        trained=trained,
        cast=cast_parameters(size, recipe, lowered),
        ranks=ranks_started(),
        shards=max(1, ranks_started() // recipe.parallel.replicas),
        tensor=recipe.parallel.tensor if ranks_started() > 1 else 1,
        experts=recipe.parallel.experts if ranks_started() > 1 else 1,
        context=recipe.parallel.context if ranks_started() > 1 else 1,
        critic=trained - (0 if size.tied or recipe.model.lora.rank else size.table),
    )
