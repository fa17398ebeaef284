"""`sixfold eval RECIPE --checkpoint DIR [DIR ...] [--against DIR] [--out DIR]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.model_source import with_model_folders
from ..errors import UserError
from ..recipe.plan import make_plan
from ..recipe.toml import load_recipe
from .parsing import RECIPE_HELP, VerbParser


def parser() -> VerbParser:
    """Arguments of the verb."""
    text = (
        "Evaluate checkpoints on the recipe's held-out tasks: share solved, pass@k and mean score,"
        " with 95 % intervals."
    )
    arguments = VerbParser("eval", text, takes_recipe=True)
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    what = "checkpoints, runs or Hugging Face models to evaluate; each is a row of the table"
    arguments.add_argument(
        "--checkpoint", metavar="DIR", nargs="+", action="extend", required=True, help=what
    )
    arguments.add_argument(
        "--against",
        metavar="DIR",
        help="baseline checkpoint; the others are compared with it by a paired test",
    )
    arguments.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for results.json and completions (default: a new folder in DIR/evaluations)",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and evaluate."""
    given, settings = parser().parse(argv)
    recipe = with_model_folders(load_recipe(given.recipe, settings))
    if not make_plan(recipe).evaluations:
        raise UserError(
            "nothing to evaluate on: data.heldout = 0 and data.heldout_split is empty; set one of"
            " them"
        )
    from ..commands.evaluate import evaluate_command

    return evaluate_command(recipe, given.checkpoint, given.against, given.out)
