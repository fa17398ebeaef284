"""The size of a run's KV cache on the device that the run has."""

from __future__ import annotations

import json

from .config import Recipe
from .engine import kv_budget
from .errors import UserError
from .model.device import free_memory
from .model.loading import Policy
from .plan import kv_numbers_per_token
from .plan_algorithm import resolve_algorithm


def kv_tokens(recipe: Recipe, policy: Policy, longest: int, notes: list[str]) -> int:
    """Tokens of the KV cache: room for `engine.max_running` sequences, on a GPU what fits of it.

    Args:
        recipe: the whole run.
        policy: on its device, and with it the engine's own copy where the recipe has one.
        longest: sequence, in tokens.
        notes: told where less fits than is wanted.

    Raises:
        UserError: not even one sequence fits.
    """
    engine = recipe.engine
    wanted = kv_budget.wanted_tokens(engine.max_running, longest, engine.block_size)
    config = json.loads(policy.model.config.get_text_config().to_json_string(use_diff=False))
    memory, numbers = free_memory(policy.model.device), kv_numbers_per_token(config)
    if memory is None or numbers is None:
        return wanted
    free, total = memory
    per_token = numbers * (2 if recipe.run.precision == "bfloat16" else 4)
    reserved = reserved_bytes(recipe, policy, config) + int(kv_budget.HEADROOM * total)
    tokens = kv_budget.tokens_that_fit(free, reserved, per_token, wanted)
    tokens -= tokens % engine.block_size
    one = kv_budget.wanted_tokens(1, longest, engine.block_size)
    if tokens < one:
        raise UserError(
            f"engine.kv_tokens = 0: one sequence of {longest} tokens needs {one * per_token / 1e9:.1f} GB of KV cache; of {free / 1e9:.1f} GB free "
            f"training needs about {reserved / 1e9:.1f}. Lower rollout.max_new_tokens or trainer.max_tokens_per_microbatch, or set "
            "run.precision = 'bfloat16', engine.release_kv = true or trainer.activation_checkpointing = 'full'"
        )
    if tokens < wanted:
        notes.append(
            f"KV cache: {tokens:,} tokens ({tokens * per_token / 1e9:.1f} GB) fit beside training, not the {wanted:,} "
            f"({wanted * per_token / 1e9:.1f} GB) of engine.max_running = {engine.max_running} full-length sequences: fewer run at a time; "
            "engine.preemption = 'recompute' admits more, engine.kv_tokens sets another size"
        )
    return tokens


def reserved_bytes(recipe: Recipe, policy: Policy, config: dict[str, int]) -> int:
    """Bytes that training will need on the policy's device besides the policy's weights.

    With `engine.release_kv` the cache is gone while the trainer works, so only what stays between
    steps counts.
    """
    method, trainer = resolve_algorithm(recipe.algorithm), recipe.trainer
    held = kv_budget.held_for_training(
        sum(p.numel() for p in policy.model.parameters()),
        lowered=recipe.run.precision == "bfloat16",
        references=int(method.needs_reference),
        critics=int(method.needs_critic and recipe.critic.body == "own"),
    )
    if recipe.engine.release_kv:
        return held
    heads, hidden = config.get("num_attention_heads", 0), config.get("hidden_size", 0)
    head_dim = config.get("head_dim") or hidden // max(1, heads)
    return held + kv_budget.used_while_training(
        kv_budget.LayerSizes(
            layers=config.get("num_hidden_layers", 0),
            hidden=hidden,
            intermediate=config.get("intermediate_size") or 4 * hidden,
            attention=head_dim * (heads + 2 * (config.get("num_key_value_heads") or heads)),
        ),
        trainer.max_tokens_per_microbatch,
        trainer.logprob_chunk,
        int(config.get("vocab_size", 0)),
        width=2 if recipe.run.precision == "bfloat16" else 4,
        recompute=trainer.activation_checkpointing == "full",
    )
