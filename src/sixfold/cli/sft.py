"""`sixfold sft RECIPE`: the supervised warm-up of a recipe, and no RL."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from ..recipe.toml import load_recipe
from .parsing import RECIPE_HELP, VerbParser
from .train import start


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "sft", "Run only the supervised warm-up (SFT) of a recipe.", takes_recipe=True
    )
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    arguments.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier run of the same name, which is deleted when the new run ends",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and train."""
    given, settings = parser().parse(argv)
    recipe = load_recipe(given.recipe, settings)
    if recipe.sft.steps == 0:
        raise UserError(
            f"sft.steps = 0 in {given.recipe}: there is no warm-up to run; set it, e.g."
            " --sft.steps 200"
        )
    return start(recipe, resume=None, overwrite=given.overwrite, stop_after="sft")
