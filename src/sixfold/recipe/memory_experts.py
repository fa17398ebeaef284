"""Memory of a mixture of experts: routers, the record of their choices, tokens between ranks.

No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from .layer_sizes import ExpertSize
from .memory_part import WEIGHTS, Part
from .model_size import ModelSize
from .schema import Recipe

INDEX = 8
"""Bytes of an index of an expert in PyTorch."""
PACKED = 2
"""Bytes of a recorded expert in a packed row."""


def record_bytes(recipe: Recipe, experts: ExpertSize | None) -> int:
    """Bytes per token of the record of experts, in the KV cache and in trajectories."""
    return 0 if experts is None or recipe.moe.routing == "free" else experts.record


def expert_parts(
    recipe: Recipe, size: ModelSize, tokens: int, longest: int | None, group: int = 1
) -> tuple[Part, ...]:
    """Memory of router logits, choices and exchanged tokens in a micro-batch, and of the records.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        tokens: tokens of one micro-batch.
        longest: longest sequence, in tokens. None: not known.
        group: ranks of an expert group. 1: there are none.
    """
    experts = size.experts
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
    if group > 1:
        parts.append(_exchanged(recipe, experts, tokens, size.hidden))
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


EXCHANGED = 2
"""Tables of tokens that exist while a layer exchanges them: those sent, and those received."""


def _exchanged(recipe: Recipe, experts: ExpertSize, tokens: int, hidden: int) -> Part:
    """Tokens that the ranks of an expert group send each other, if all experts are used equally.

    A rank keeps the outputs that it gets back, for the gradient of their weights. With activation
    checkpointing it keeps those of one layer at a time.

    Args:
        recipe: the whole run.
        experts: sizes of the policy's expert layers.
        tokens: tokens of one micro-batch.
        hidden: width of the residual stream.
    """
    kept, layers = 1, "one layer"
    if recipe.trainer.activation_checkpointing == "none":
        kept, layers = experts.layers, f"all {experts.layers} layers with experts"
    return Part(
        "exchanged tokens",
        tokens * experts.top_k * hidden * WEIGHTS * (kept + EXCHANGED),
        f"{tokens:,} tokens x {experts.top_k} experts x {hidden:,} x {WEIGHTS} bytes: outputs of"
        f" {layers}, and {EXCHANGED} tables of the running layer",
        samples=False,
    )
