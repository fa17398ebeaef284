"""`sixfold audit RECIPE` and `sixfold audit --cases FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..recipe.toml import load_recipe
from .parsing import VerbParser, above_zero, at_least

TEXT = """\
Look for faults of a recipe's environment before you train on it.

Without a model: reference answers must earn full marks, also with other words around them; wrong
answers, random text, constants and known exploits must earn nothing; no task may be repeated or
solved by an empty answer; long and nested texts must be answered in time; and the checks must be
fast enough for a training step.

With --model, 50 completions of the model are sampled, for the share that it solves.

With --cases, each line has id, verdict, expected and seconds, and how the check ended (outcome).

Exit code: 0, or 1 if you should not train on this environment or if a case has another verdict than
expected, 2 for bad input.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("audit", TEXT, takes_recipe=True)
    arguments.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="a .toml file, or the name of a shipped recipe; its data and rewards are audited",
    )
    arguments.add_argument(
        "--tasks",
        metavar="N",
        type=at_least(1),
        default=64,
        help="number of training tasks on which texts are tried (default 64)",
    )
    arguments.add_argument(
        "--step-seconds",
        metavar="S",
        type=above_zero,
        help="seconds of a training step (default: measured by the recipe's run, if it exists)",
    )
    arguments.add_argument(
        "--model", metavar="DIR", help="checkpoint, run or model whose pass rate is measured"
    )
    arguments.add_argument(
        "--json", action="store_true", help="print one JSON object per check instead of a table"
    )
    arguments.add_argument(
        "--cases",
        metavar="FILE",
        type=Path,
        help="instead of a recipe: score a JSON file of verifier cases or sandbox attacks with the"
        " built-in verifiers, and print one JSON line per case",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and audit."""
    given, settings = parser().parse(argv)
    if (given.recipe is None) == (given.cases is None):
        raise UserError("sixfold audit: give either a recipe or --cases FILE")
    if given.cases:
        if settings:
            raise UserError(f"sixfold audit --cases takes no settings: leave out {settings[0]}")
        from ..commands.audit_cases import audit_cases_command

        return audit_cases_command(given.cases)
    from ..commands.audit import AuditOptions, audit_command

    recipe = load_recipe(given.recipe, settings)
    options = AuditOptions(given.tasks, given.step_seconds, given.model or "", given.json)
    return audit_command(recipe, options)
