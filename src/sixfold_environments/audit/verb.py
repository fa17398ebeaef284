"""`sixfold audit RECIPE` and `sixfold audit --cases FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sixfold.cli.parsing import PositiveFloat, PositiveInt, VerbParser, argument, option
from sixfold.errors import UserError
from sixfold.recipe.toml import load_recipe

from .finding import Finding, worst

PURPOSE = "look for faults of an environment before training on it"

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

COLOURS = {"ok": "green", "warning": "yellow", "failure": "red", "skipped": "dim"}


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str | None = argument(
        "a .toml file, or the name of a shipped recipe; its data and rewards are audited", None
    )
    tasks: PositiveInt = option(
        "number of training tasks on which texts are tried (default 64)", 64
    )
    step_seconds: PositiveFloat | None = option(
        "seconds of a training step (default: measured by the recipe's run, if it exists)",
        metavar="S",
    )
    model: str = option("checkpoint, run or model whose pass rate is measured", "", metavar="DIR")
    json: bool = option("print one JSON object per check instead of a table", False)
    cases: Path | None = option(
        "instead of a recipe: score a JSON file of verifier cases or sandbox attacks with the"
        " built-in verifiers, and print one JSON line per case",
        metavar="FILE",
    )
    settings: tuple[str, ...] = ()


PARSER = VerbParser("audit", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Audit the environment of a recipe, or score cases, and print what was found."""
    given = PARSER.parse(arguments)
    if (given.recipe is None) == (given.cases is None):
        raise UserError("sixfold audit: give either a recipe or --cases FILE")
    if given.cases:
        if given.settings:
            raise UserError(
                f"sixfold audit --cases takes no settings: leave out {given.settings[0]}"
            )
        from .cases import audit_cases_command

        return audit_cases_command(given.cases)
    from .of_recipe import findings_of_recipe

    recipe = load_recipe(given.recipe or "", given.settings)
    console = Console(soft_wrap=True)
    findings = []
    for finding in findings_of_recipe(recipe, given.tasks, given.step_seconds, given.model):
        findings.append(finding)
        if given.json:
            print(json.dumps(finding.to_record()), flush=True)
        else:
            console.print(_shown(finding))
    level = worst(findings)
    verdict = {
        "failure": "Do not train on this environment before its failures are fixed.",
        "warning": "You can train on this environment. Look at the warnings first.",
    }.get(level, "No fault was found.")
    print(f"\n{verdict}", file=sys.stderr if given.json else sys.stdout)
    return 1 if level == "failure" else 0


def _shown(finding: Finding) -> Text:
    """A finding in colour: its level, its result, and its details below."""
    line = Text(f"{finding.level:<8}", style=COLOURS[finding.level])
    line.append(f" {finding.check}: ", style="bold")
    line.append(finding.result, style="default")
    for detail in finding.details:
        line.append(f"\n           {detail}", style="dim")
    if finding.remedy:
        line.append(f"\n         {finding.remedy}", style="default")
    return line
