"""`sixfold explain RECIPE`."""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.cli.parsing import RECIPE_HELP, VerbParser
from sixfold.plan import make_plan
from sixfold.plan_text import explain
from sixfold.recipe_io import load_recipe


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("explain", "What a recipe resolves to, in plain words, with the reason for each number.", takes_recipe=True)
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse and print."""
    given, settings = parser().parse(argv)
    print(explain(make_plan(load_recipe(given.recipe, settings))))
    return 0
