"""Memory of the routers of a mixture of experts, and of the record of their choices. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from .memory_part import WEIGHTS, Part
from .model_size import ExpertSize
from .schema import Recipe

INDEX = 8
"""Bytes of an index of an expert in PyTorch."""
PACKED = 2
"""Bytes of a recorded expert in a packed row."""


def record_bytes(recipe: Recipe, experts: ExpertSize | None) -> int:
    """Bytes per token of the record of experts, in the KV cache and in trajectories."""
    return 0 if experts is None or recipe.moe.routing == "free" else experts.record


def expert_parts(
    recipe: Recipe, experts: ExpertSize | None, tokens: int, longest: int | None
) -> tuple[Part, ...]:
    """Memory of router logits and choices in a micro-batch, and of the records of a step.

    Args:
        recipe: the whole run.
        experts: sizes of the policy's expert layers. None: there are none.
        tokens: tokens of one micro-batch.
        longest: longest sequence, in tokens. None: not known.
    """
    if experts is None:
        return ()
    routing, choices = recipe.moe.routing, INDEX * experts.top_k
    each = WEIGHTS * experts.count + choices
    if routing != "free":
        each += PACKED * experts.top_k
    if routing == "replay":
        each += 2 * choices  # given choices, and those of the routers themselves
    parts = [
        Part(
            "routers",
            tokens * experts.layers * each,
            f"{tokens:,} tokens x {experts.layers} layers x {each} bytes: logits and choices",
            samples=False,
        )
    ]
    if record := record_bytes(recipe, experts):
        rollout = recipe.rollout
        count = rollout.prompts_per_step * rollout.samples_per_prompt
        parts.append(
            Part(
                "experts of the samples",
                count * (longest or 0) * record,
                f"{count:,} trajectories x {longest or 0:,} tokens x {record} bytes",
                host=True,
            )
        )
    return tuple(parts)
