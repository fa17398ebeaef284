"""Checks of the settings of a rollout backend. No torch."""

from __future__ import annotations

from ..errors import UserError
from .dump import toml_literal
from .schema import EngineConfig, Recipe


def check_backend(recipe: Recipe) -> None:
    """Refuse settings that an engine in another process does not support.

    Raises:
        UserError: names the setting and the remedy.
    """
    r = recipe.rollout
    backend = r.backend.kind
    if backend == "engine":
        return
    if recipe.sync.quantised:
        raise UserError(
            f"sync.kind = '{recipe.sync.kind}' rounds the embedded engine's weights, but"
            f" rollout.backend.kind = '{backend}' samples elsewhere. Use rollout.backend.kind ="
            " 'engine', or sync.kind = 'copy'"
        )
    unused = _only_embedded(recipe) + (
        _options_of_the_server(recipe) * (backend in ("sglang", "sixfold"))
    )
    for key, value, default in unused:
        if value != default:
            raise UserError(
                f"{key} = {toml_literal(value)} has no effect with rollout.backend.kind ="
                f" '{backend}'. Remove it, or use rollout.backend.kind = 'engine'"
            )
    if backend != "sixfold" and (r.top_p < 1 or r.top_k or r.min_p):
        raise UserError(
            f"rollout.top_p, top_k and min_p: rollout.backend.kind = '{backend}' does not report"
            " which tokens it kept, so the trainer cannot score them. Switch them off, or use"
            " rollout.backend.kind = 'engine'"
        )


def _only_embedded(recipe: Recipe) -> list[tuple[str, object, object]]:
    """Settings that only the embedded engine supports, as (key, value, default)."""
    engine, default = recipe.engine, EngineConfig()
    return [
        ("moe.routing", recipe.moe.routing, "free"),
        ("engine.preemption.kind", engine.preemption.kind, "none"),
        ("engine.speculation.kind", engine.speculation.kind, "none"),
        ("engine.kv_dtype", engine.kv_dtype, "auto"),
        ("engine.chunked_prefill", engine.chunked_prefill, False),
        ("engine.continuous", engine.continuous, True),
        ("engine.block_size", engine.block_size, default.block_size),
        ("engine.release_kv", engine.release_kv, False),
        ("engine.cuda_graphs", engine.cuda_graphs, "auto"),
    ]


def _options_of_the_server(recipe: Recipe) -> list[tuple[str, object, object]]:
    """Settings that a server gets when it is started, not from here: (key, value, default)."""
    engine, default = recipe.engine, EngineConfig()
    return [
        ("engine.max_running", engine.max_running, default.max_running),
        ("engine.kv_tokens", engine.kv_tokens, default.kv_tokens),
        (
            "engine.prefill_tokens_per_step",
            engine.prefill_tokens_per_step,
            default.prefill_tokens_per_step,
        ),
        ("engine.prefix_cache", engine.prefix_cache, default.prefix_cache),
    ]
