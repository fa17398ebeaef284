"""Explain the model and where its weights are."""

from __future__ import annotations

from ..backend import parse_backend
from ..plan import TRAINING_BYTES_PER_PARAMETER, Plan
from ..schema import Recipe
from .fact import UNKNOWN, Fact, bytes_text, count_text


def model_facts(plan: Plan) -> list[Fact]:
    model = plan.model
    if model.parameters is None:
        size, state = UNKNOWN, UNKNOWN
    else:
        size, state = (
            count_text(model.parameters),
            bytes_text(TRAINING_BYTES_PER_PARAMETER * model.parameters),
        )
    return [
        Fact(
            "model",
            f"{model.origin}; parameters: {size}",
            "" if plan.recipe.model.path else "model.path is empty; token embeddings are tied",
        ),
        Fact(
            "context",
            f"{model.context or UNKNOWN}"
            + (" tokens, prompt and completion together" if model.context else ""),
        ),
        Fact(
            "memory",
            f"training state: {state}",
            "float32 weights, gradient and two AdamW moments are 16 bytes a parameter",
        ),
        *_sampler_facts(plan.recipe),
    ]


def _sampler_facts(recipe: Recipe) -> list[Fact]:
    """Which engine samples, and how it gets the weights."""
    backend, sync = parse_backend(recipe.rollout.backend), recipe.sync
    where = f"forward passes in {recipe.run.precision} on device {recipe.run.device}"
    if backend.kind == "engine":
        copies = (
            "engine and trainer share one set of weights"
            if sync.mode == "shared"
            else "the engine has its own copy of the weights"
        )
        copies += (
            f", rounded as if in {sync.mode} (simulated: nothing is saved)"
            if sync.quantised
            else ""
        )
        return [Fact("weights", f"{copies}; {where}", f"sync.mode = {sync.mode}")]
    vllm = f"vLLM in a process of its own, under {backend.python or 'this Python'}"
    who = vllm if backend.kind == "vllm" else f"SGLang at {backend.url}, which must be running"
    when = f"every {sync.every} steps" if sync.every > 1 else "after every step"
    return [
        Fact("sampler", who, f"rollout.backend = {recipe.rollout.backend}"),
        Fact(
            "weights",
            f"the sampler has its own copy, handed over {when}; trainer: {where}",
            "it shares no memory with the trainer",
        ),
    ]
