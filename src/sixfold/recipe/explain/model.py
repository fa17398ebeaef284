"""Explain the model and where its weights are."""

from __future__ import annotations

from ...sizing.held import held_parts, holdings
from ..plan import Plan
from ..schema import Backend, LoraConfig, RunConfig, SyncConfig
from .fact import UNKNOWN, Fact, bytes_text, count_text


def model_facts(plan: Plan) -> list[Fact]:
    model, recipe = plan.model, plan.recipe
    size = UNKNOWN if model.parameters is None else count_text(model.parameters)
    return [
        Fact(
            "model",
            f"{model.origin}; parameters: {size}",
            "" if recipe.model.path else "model.path is empty; token embeddings are tied",
        ),
        Fact(
            "context",
            f"{model.context or UNKNOWN}"
            + (" tokens, prompt and completion together" if model.context else ""),
        ),
        *_adapter_facts(recipe.model.lora, full_sft=recipe.full_sft),
        _training_state(plan),
        *_sampler_facts(recipe.rollout.backend, recipe.sync, recipe.run),
    ]


def _adapter_facts(lora: LoraConfig, *, full_sft: bool) -> list[Fact]:
    """Kind, rank, targets and scale of the LoRA adapter. Empty if all weights are trained."""
    if not lora.rank:
        return []
    kind = "DoRA" if lora.dora else "LoRA"
    return [
        Fact(
            "adapter",
            f"{kind} of rank {lora.rank} on {', '.join(lora.targets)}, scale {lora.scale:g}; the"
            f" base is frozen in {lora.base}"
            + (" after SFT of all its weights" if full_sft else ""),
            f"scale = alpha / {'sqrt(rank)' if lora.rslora else 'rank'}",
        )
    ]


def _training_state(plan: Plan) -> Fact:
    """Line of `sixfold explain` with the bytes of weights, gradients and optimizer state."""
    size = plan.model.size
    held = None if size is None else holdings(plan.recipe, size)
    if held is None:
        return Fact("memory", f"training state: {UNKNOWN}")
    names = ("weights", "adapter", "gradients", "AdamW moments")
    parts = [p for p in held_parts(plan.recipe, held) if p.name in names]
    what = ", ".join(part.name for part in parts)
    state = bytes_text(sum(part.size for part in parts))
    return Fact("memory", f"training state: {state}", f"{what}; all memory: GPU memory, below")


def _sampler_facts(backend: Backend, sync: SyncConfig, run: RunConfig) -> list[Fact]:
    """Facts about the engine that samples, and how it gets the weights."""
    where = f"forward passes in {run.precision} on device {run.device}"
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
        who = f"the {program} at {' and '.join([backend.url, *backend.replicas])}, which must be"
        who += " running"
    return [
        Fact("sampler", who, f"rollout.backend.kind = {backend.kind}"),
        Fact(
            "weights",
            f"the sampler has its own copy of the weights, updated {when}; trainer: {where}",
            "the sampler shares no memory with the trainer",
        ),
    ]
