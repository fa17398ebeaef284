"""`sixfold eval RECIPE --checkpoint DIR [--against DIR]`."""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.cli.parsing import RECIPE_HELP, VerbParser
from sixfold.errors import UserError
from sixfold.plan import make_plan
from sixfold.recipe_io import load_recipe


def parser() -> VerbParser:
    """Arguments of the verb."""
    text = "Mean reward and pass@k of a checkpoint on the recipe's held-out tasks, with 95 % intervals."
    arguments = VerbParser("eval", text, takes_recipe=True)
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    arguments.add_argument("--checkpoint", metavar="DIR", required=True, help="a checkpoint, a run, or a Hugging Face model")
    arguments.add_argument("--against", metavar="DIR", help="a second one: paired test on the same tasks")
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse and evaluate."""
    given, settings = parser().parse(argv)
    recipe = load_recipe(given.recipe, settings)
    if not make_plan(recipe).evaluations:
        raise UserError("nothing to evaluate on: data.heldout = 0 and data.heldout_split is empty; set one of them")
    from sixfold.evaluation.command import evaluate_command

    return evaluate_command(recipe, given.checkpoint, given.against)
