"""The table of `sixfold eval`, and what results.json says of every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..evaluation.results import completions_file, make_out, write_results
from ..evaluation.statistics import Interval, PairedTest, paired_test
from ..files.folder import installed_version
from ..recipe.schema import RunConfig
from ..report.numbers import p_value, percent, points
from ..types import Group

LONGEST_NAME = 24
"""Letters of a path at the head of a column. Longer paths are numbered and listed above."""


@dataclass(frozen=True)
class EvaluatedModel:
    """Evaluation of a reward model or a process reward model.

    Attributes:
        path: the model as the user named it.
        model: its folder, or its folders with commas.
        shares: how much of each row it has right, by the row's id.
        labelled: figures of the table by label.
        figures: figures for results.json.
        groups: what it has scored.
        notes: lines to print.
    """

    path: str
    model: str
    shares: Mapping[str, float]
    labelled: Mapping[str, str]
    figures: Mapping[str, Any]
    groups: Sequence[Group]
    notes: Sequence[str]


def models_to_evaluate(paths: Sequence[str], against: str | None) -> list[str]:
    """Each path once. The baseline is the last."""
    others = [path for path in dict.fromkeys(paths) if path != against]
    return [*others, against] if against else others


def report_models(
    kind: str,
    unit: str,
    found: Sequence[EvaluatedModel],
    against: str | None,
    run: RunConfig,
    out: Path | None,
) -> None:
    """Print the table and the differences, and write the results.

    Args:
        kind: key of the models in results.json.
        unit: what a row is called.
        found: the evaluations, that of the baseline last.
        against: the baseline. The others are compared with it on the rows that both have scored.
        run: the recipe's [run] section.
        out: folder for results.json and the scores. None: the next free one under `run.dir`.
    """
    tests = {one.path: _compared(one, found[-1]) for one in found[:-1]} if against else {}
    console = Console()
    for one in found:
        for note in one.notes:
            console.print(f"{one.path}: {note}", soft_wrap=True, markup=False)
    print_columns(console, [one.path for one in found], [one.labelled for one in found])
    print_differences(console, against, tests, unit)
    folder = make_out(out, Path(run.dir), run.name)
    results = {
        "recipe": run.name,
        "seed": run.seed,
        kind: [
            {
                "checkpoint": one.path,
                "model": one.model,
                **one.figures,
                "notes": one.notes,
                "completions": completions_file(number),
            }
            for number, one in enumerate(found, start=1)
        ],
        "comparisons": recorded_differences(against, tests),
        "versions": versions(),
    }
    written = write_results(folder, results, [one.groups for one in found])
    console.print(f"results and scores: {written.parent}", soft_wrap=True)


def _compared(a: EvaluatedModel, b: EvaluatedModel) -> PairedTest:
    both = [row for row in a.shares if row in b.shares]
    return paired_test([a.shares[row] for row in both], [b.shares[row] for row in both])


def add_interval(
    rows: dict[str, str], label: str, share: Interval, form: Callable[[float], str] = percent
) -> None:
    """Add a figure, and its interval in the row below."""
    rows[label] = form(share.mean)
    # A label for each, as rows are looked up by it.
    rows[f"  95% of {label}"] = f"{form(share.low)} to {form(share.high)}"


def print_columns(
    console: Console, paths: Sequence[str], columns: Sequence[Mapping[str, str]]
) -> None:
    """One row per figure, and one column per model: as many side by side as there is room.

    Args:
        console: where to print.
        paths: the models as the user named them.
        columns: figures of each by label.
    """
    labels = list(dict.fromkeys(label for rows in columns for label in rows))
    names = list(paths)
    if max(map(len, names)) > LONGEST_NAME:
        names = [f"[{number}]" for number in range(1, len(paths) + 1)]
        for name, path in zip(names, paths, strict=True):
            console.print(Text(f"{name} {path}"))
    width = max(len(cell) for cell in (*names, *(c for rows in columns for c in rows.values())))
    beside = max(1, (console.width - max(map(len, labels)) - 2) // (width + 2))
    for first in range(0, len(names), beside):
        console.print()
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("")
        for name in names[first : first + beside]:
            table.add_column(Text(name), overflow="fold")
        for label in labels:
            cells = [rows.get(label, "-") for rows in columns[first : first + beside]]
            table.add_row(Text(label), *map(Text, cells))
        console.print(table)


def print_differences(
    console: Console,
    against: str | None,
    tests: Mapping[str, PairedTest],
    unit: str = "tasks",
) -> None:
    """One line per model that is compared with the baseline."""
    for path, test in tests.items():
        d = test.difference
        console.print(
            f"{path} minus {against}: {points(d.mean)} points ({points(d.low)} to"
            f" {points(d.high)}), better on {test.wins} {unit}, worse on {test.losses},"
            f" {p_value(test.p_value)} ({test.test})"
        )


def recorded_differences(
    against: str | None, tests: Mapping[str, PairedTest], compared: str = "checkpoint"
) -> list[dict[str, Any]]:
    """JSON form of what `print_differences` prints. `compared`: key of what is compared."""
    return [
        {
            compared: path,
            "against": against,
            "difference": test.difference.mean,
            "difference_interval": list(test.difference[1:]),
            "wins": test.wins,
            "losses": test.losses,
            "p_value": test.p_value,
            "test": test.test,
        }
        for path, test in tests.items()
    ]


def versions() -> dict[str, str | None]:
    """Versions of the packages that decide the figures."""
    return {name: installed_version(name) for name in ("sixfold", "torch", "transformers")}
