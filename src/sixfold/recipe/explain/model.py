"""Explain the model and where its weights are."""

from __future__ import annotations

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
            "float32 weights, gradient and two AdamW moments are 16 bytes per parameter",
        ),
        *_sampler_facts(plan.recipe),
    ]


def _sampler_facts(recipe: Recipe) -> list[Fact]:
    """Facts about the engine that samples, and how it gets the weights."""
    backend, sync = recipe.rollout.backend, recipe.sync
    where = f"forward passes in {recipe.run.precision} on device {recipe.run.device}"
    when = f"every {sync.every} steps" if sync.every > 1 else "after every step"
    if backend.kind == "engine":
        copies = (
            "engine and trainer share one set of weights"
            if sync.kind == "shared"
            else f"the engine has its own copy of the weights, updated {when}"
        )
        if sync.quantised:
            copies += f", rounded as in {sync.kind} (simulated: no memory or time is saved)"
        return [Fact("weights", f"{copies}; {where}", f"sync.kind = {sync.kind}")]
    if backend.kind == "vllm":
        who = f"vLLM in its own process, run by {backend.python or 'the same Python interpreter'}"
    else:
        program = "SGLang server" if backend.kind == "sglang" else "Sixfold server"
        who = f"the {program} at {backend.url}, which must be running"
    return [
        Fact("sampler", who, f"rollout.backend.kind = {backend.kind}"),
        Fact(
            "weights",
            f"the sampler has its own copy of the weights, updated {when}; trainer: {where}",
            "the sampler shares no memory with the trainer",
        ),
    ]
