"""`sixfold critique RECIPE --out FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..recipe.toml import load_recipe
from .parsing import RECIPE_HELP, VerbParser, at_least

TEXT = """\
Make preference pairs by critique and revision (constitutional AI).

The judge of environment.judge checks each answer against each principle. It rewrites an answer that
violates a principle. If the revision does not violate it, one JSON line is written:
{"prompt", "chosen": revision, "rejected": answer, "principle", "critique"}.

The answers come from --drafts, or are sampled from the recipe's model. The judge's replies are
stored in FILE.judge/, so a second run after a spent budget asks no question twice.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("critique", TEXT, takes_recipe=True)
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    arguments.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="new file for the pairs"
    )
    arguments.add_argument(
        "--principles",
        metavar="FILE",
        type=Path,
        help="principles, one per line as TEXT or NAME: TEXT; lines that begin with # are comments"
        " (default: environment.judge.constitution.principles)",
    )
    arguments.add_argument(
        "--drafts",
        metavar="FILE",
        type=Path,
        help="answers as JSON lines with prompt and completion (default: sample them)",
    )
    arguments.add_argument(
        "--model",
        metavar="DIR",
        help="checkpoint, run or model to sample from (default: the recipe's model)",
    )
    arguments.add_argument(
        "--tasks",
        metavar="N",
        type=at_least(1),
        default=64,
        help="number of training tasks to sample answers for (default 64)",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and make the pairs."""
    given, settings = parser().parse(argv)
    recipe = load_recipe(given.recipe, settings)
    if not recipe.environment.judge.model:
        raise UserError(
            "sixfold critique needs a judge: set environment.judge.url and environment.judge.model,"
            " or environment.judge.model alone for a local folder"
        )
    if given.drafts and given.model:
        raise UserError("sixfold critique: --drafts and --model exclude each other. Give one")
    from ..commands.critique import CritiqueOptions, critique_command

    options = CritiqueOptions(
        given.out, given.principles, given.drafts, given.model or "", given.tasks
    )
    return critique_command(recipe, options)
