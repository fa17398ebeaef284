"""`sixfold audit RECIPE`."""

from __future__ import annotations

from collections.abc import Sequence

from ..recipe.toml import load_recipe
from .parsing import VerbParser, above_zero, at_least

TEXT = """\
Look for faults of a recipe's environment before you train on it.

Without a model: reference answers must earn full marks, also with other words around them; wrong
answers, random text, constants and known exploits must earn nothing; no task may be repeated or
solved by an empty answer; long and nested texts must be answered in time; and the checks must be
fast enough for a training step.

With --model, 50 completions of the model are sampled, for the share that it solves.

Exit code: 0, or 1 if you should not train on this environment, 2 for bad input.
"""


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("audit", TEXT, takes_recipe=True)
    arguments.add_argument(
        "recipe",
        metavar="RECIPE",
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
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and audit."""
    given, settings = parser().parse(argv)
    from ..commands.audit import AuditOptions, audit_command

    recipe = load_recipe(given.recipe, settings)
    options = AuditOptions(given.tasks, given.step_seconds, given.model or "", given.json)
    return audit_command(recipe, options)
