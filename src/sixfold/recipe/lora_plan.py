"""Checks of the settings that contradict the training of a LoRA adapter. No torch."""

from __future__ import annotations

from ..algorithm.method import Method
from ..errors import UserError
from .schema import Recipe


def check_lora(recipe: Recipe, method: Method) -> None:
    """Refuse settings that contradict `model.lora`.

    Args:
        recipe: the recipe.
        method: the recipe's resolved algorithm.

    Raises:
        UserError: names the setting and the remedy.
    """
    lora = recipe.model.lora
    if not lora.rank:
        return
    if lora.base != "float32" and recipe.run.precision != "bfloat16":
        raise UserError(
            f"model.lora.base = '{lora.base}' needs forward passes in bfloat16: set run.precision ="
            " 'bfloat16', or model.lora.base = 'float32'"
        )
    outside = recipe.rollout.backend.kind != "engine"
    if lora.base == "nf4" and (outside or recipe.sync.kind != "shared"):
        setting, value, remedy = "sync.kind", str(recipe.sync.kind), "shared"
        if outside:
            setting, value, remedy = "rollout.backend.kind", recipe.rollout.backend.kind, "engine"
        raise UserError(
            f"model.lora.base = 'nf4' stores the base in 4 bits, but {setting} = '{value}' gives"
            f" the sampler merged weights of its own: set {setting} = '{remedy}', or"
            " model.lora.base = 'bfloat16'"
        )
    if lora.dora and recipe.sync.kind == "shared" and recipe.rollout.backend.kind == "engine":
        raise UserError(
            "model.lora.dora = true rescales the weights of the base, so the engine needs merged"
            " weights of its own: set sync.kind = 'copy'"
        )
    own = recipe.reference
    if method.needs_reference and own.placement == "worker" and not own.path:
        raise UserError(
            "reference.placement = 'worker' would hold a second copy of the base. With"
            " model.lora.rank > 0 the reference is the base itself: set 'inline' or 'fused'"
        )
