"""`sixfold explain RECIPE`."""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.model_source import with_model_folders
from ..recipe.explain import explain
from ..recipe.plan import make_plan
from ..recipe.toml import load_recipe
from ..report.untrusted import visible
from .parsing import RECIPE_HELP, VerbParser


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "explain",
        "Explain a recipe in words: resolved values, with the reason for each number.",
        takes_recipe=True,
    )
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    arguments.add_argument(
        "--render",
        action="store_true",
        help=(
            "also load the tokenizer and the tasks, and show the first prompt with its special"
            " tokens, and the tokens that end a completion"
        ),
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and print."""
    given, settings = parser().parse(argv)
    recipe = with_model_folders(load_recipe(given.recipe, settings))
    print(explain(make_plan(recipe)))
    if given.render:
        from ..run.rendered_prompt import render_recipe

        print("", *map(visible, render_recipe(recipe)), sep="\n")
    return 0
