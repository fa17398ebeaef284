"""Memory that a run holds from start to end: weights, gradients, optimizer state, copies. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from .algorithm_plan import resolve_algorithm
from .memory_part import GRADIENT, LOWERED, MOMENTS, WEIGHTS, Part, number_width
from .schema import Recipe


def held_parts(
    recipe: Recipe, parameters: int, teacher: int | None = None, draft: int | None = None
) -> tuple[Part, ...]:
    """Memory that is held for the whole run.

    Args:
        recipe: the whole run.
        parameters: parameters of the policy.
        teacher: parameters of a separate reference model. None: as the policy.
        draft: parameters of the draft model. None: there is none.
    """
    method, embedded = resolve_algorithm(recipe.algorithm), recipe.rollout.backend.kind == "engine"
    parts = [
        Part("weights", WEIGHTS * parameters, "4 bytes per parameter, float32", early=True),
        Part("gradients", GRADIENT * parameters, "4 bytes per parameter, float32", samples=False),
        Part("AdamW moments", MOMENTS * parameters, "8 bytes per parameter, float32"),
    ]
    if method.needs_reference:
        parts.append(
            Part("reference", WEIGHTS * (teacher or parameters), "4 bytes per parameter, float32")
        )
    if method.needs_critic and recipe.critic.body == "own":
        each = WEIGHTS + GRADIENT + MOMENTS
        parts.append(
            Part(
                "critic",
                each * parameters,
                f"{each} bytes per parameter: weights, gradients, moments",
            )
        )
    if embedded and recipe.run.precision == "bfloat16":
        parts.append(
            Part("engine's weights", LOWERED * parameters, "2 bytes per parameter, bfloat16")
        )
    if embedded and recipe.sync.kind != "shared":
        parts.append(
            Part(
                "sync copy",
                WEIGHTS * parameters,
                f"4 bytes per parameter: sync.kind = {recipe.sync.kind}",
                early=True,
            )
        )
    if draft is not None:
        width = number_width(recipe)
        parts.append(Part("draft model", width * draft, f"{width} bytes per parameter", early=True))
    return tuple(parts)
