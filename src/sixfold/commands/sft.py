"""`sixfold sft RECIPE`: the supervised warm-up of a recipe, and no RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cli.parsing import RECIPE_HELP, VerbParser, argument, option
from ..errors import UserError
from ..recipe.toml import load_recipe
from .train import OVERWRITE_HELP, start


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = argument(RECIPE_HELP)
    overwrite: bool = option(OVERWRITE_HELP, False)
    settings: tuple[str, ...] = ()


PARSER = VerbParser("sft", "Run only the supervised warm-up (SFT) of a recipe.", Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    recipe = load_recipe(given.recipe, given.settings)
    if recipe.sft.steps == 0:
        raise UserError(
            f"sft.steps = 0 in {given.recipe}: there is no warm-up to run; set it, e.g."
            " --sft.steps 200"
        )
    return start(recipe, overwrite=given.overwrite, stop_after="sft")
