"""`sixfold report RUN`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.parsing import RUN_HELP, VerbParser, argument, run_folder


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument(RUN_HELP)


PARSER = VerbParser(
    "report", "Write report.html of a run: final figures, curves, samples, time by phase.", Options
)


def run(arguments: Sequence[str]) -> int:
    """Write the report, and print its path.

    Standard error has the adapter, if the run trains one, predicted and measured durations, and
    symptoms of faulty data.
    """
    folder = run_folder(PARSER.parse(arguments).run)
    from ..report.adapter import adapter_of
    from ..report.data_faults import diagnose
    from ..report.html import write_report
    from ..report.prediction_view import prediction_text, prediction_view
    from ..report.run_record import read_run
    from ..report.untrusted import one_line

    print(write_report(folder))
    if adapter := adapter_of(folder, _recipe(folder)):
        print(f"adapter: {one_line(adapter, 200)}", file=sys.stderr)
    run = read_run(folder, dumps=False)
    if view := prediction_view(run):
        print(prediction_text(view), file=sys.stderr)
    for found in diagnose(run.metrics):
        if found.evidence:
            print(f"data: {found.symptom.name}: {found.evidence}", file=sys.stderr)
    return 0


def _recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run. Empty if it is missing or broken, which the report says."""
    try:
        return tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
