"""Checks of the settings that save memory. No torch."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import UserError
from .dump import toml_literal
from .schema import Recipe


def check_memory_settings(recipe: Recipe) -> None:
    """Refuse settings that save memory where they have no effect or cannot work.

    Raises:
        UserError: names the setting and the remedy.
    """
    _check_trainer(recipe)
    _check_reference(recipe)


def _check_trainer(recipe: Recipe) -> None:
    trainer = recipe.trainer
    if trainer.weights == "bfloat16" and recipe.model.lora.rank:
        raise UserError(
            "trainer.weights = 'bfloat16' has no effect with model.lora.rank ="
            f" {recipe.model.lora.rank}: the trained weights are the adapter's. Set model.lora.base"
            " = 'bfloat16' for the frozen weights, or use trainer.weights = 'float32'"
        )
    if trainer.weights == "bfloat16" and recipe.run.precision != "bfloat16":
        raise UserError(
            "trainer.weights = 'bfloat16' needs run.precision = 'bfloat16': float32 products cannot"
            " read bfloat16 weights. Set run.precision, or use trainer.weights = 'float32'"
        )
    if trainer.rounding == "stochastic" and trainer.weights == "float32":
        raise UserError(
            "trainer.rounding = 'stochastic' has no effect on float32 weights, which are not"
            " rounded. Set trainer.weights = 'bfloat16', or trainer.rounding = 'master'"
        )
    if trainer.optimizer == "adamw8bit" and find_spec("torchao") is None:
        raise UserError(
            "trainer.optimizer = 'adamw8bit' needs torchao, which is not installed. Run"
            " pip install 'sixfold[torchao]', or use trainer.optimizer = 'adamw'"
        )


def _check_reference(recipe: Recipe) -> None:
    reference = recipe.reference
    for key, value, default in (
        ("precision", reference.precision, "policy"),
        ("offload", reference.offload, False),
    ):
        if value != default and recipe.model.lora.rank and not reference.path:
            raise UserError(
                f"reference.{key} = {toml_literal(value)} has no effect with model.lora.rank ="
                f" {recipe.model.lora.rank}: the reference is the frozen base, which exists once."
                " Remove it"
            )
    if reference.precision == "bfloat16" and recipe.run.precision != "bfloat16":
        raise UserError(
            "reference.precision = 'bfloat16' needs run.precision = 'bfloat16': float32 products"
            " cannot read bfloat16 weights. Set run.precision, or use reference.precision ="
            " 'policy'"
        )
    if reference.offload and reference.placement != "inline":
        why = {
            "fused": "the trainer calls the reference for each micro-batch",
            "worker": "another process holds its weights",
        }[reference.placement]
        raise UserError(
            f"reference.offload = true does not work with reference.placement ="
            f" '{reference.placement}': {why}. Use reference.placement = 'inline', or"
            " reference.offload = false"
        )
