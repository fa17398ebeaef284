"""`sixfold report RUN`."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import VerbParser, run_folder


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "report", "Write report.html of a run: final figures, curves, samples, time by phase."
    )
    arguments.add_argument("run", metavar="RUN", help="the run's folder, e.g. runs/demo")
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, write the report, and print its path."""
    given, _ = parser().parse(argv)
    folder = run_folder(given.run)
    from ..report.html import write_report

    print(write_report(folder))
    return 0
