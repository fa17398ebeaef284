"""`sixfold critique RECIPE --out FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..recipe.toml import load_recipe
from .parsing import RECIPE_HELP, VerbParser, at_least

TEXT = """\
Make preference pairs by critique and revision (constitutional AI).

Answers of the recipe's model, or of --drafts, are criticised by each principle. An answer that
violates one is rewritten. If the revision follows the principle, one JSON line is written:
{"prompt", "chosen": revision, "rejected": answer, "principle", "critique"}.

The judge of environment.judge criticises and rewrites. Its answers are kept in FILE.judge/, so that
a run after a spent budget asks nothing twice.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("critique", TEXT, takes_recipe=True)
    arguments.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    arguments.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="file for the pairs; a new one"
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
        help="JSON lines with prompt and completion (default: sample from the model)",
    )
    arguments.add_argument(
        "--model", metavar="DIR", help="checkpoint, run or model that writes the answers"
    )
    arguments.add_argument(
        "--tasks",
        metavar="N",
        type=at_least(1),
        default=64,
        help="number of training tasks that are answered (default 64)",
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
        raise UserError("sixfold critique: give either --drafts or --model")
    from ..commands.critique import CritiqueOptions, critique_command

    options = CritiqueOptions(
        given.out, given.principles, given.drafts, given.model or "", given.tasks
    )
    return critique_command(recipe, options)
