"""The table of `sixfold eval`, and what results.json says of every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..evaluation.statistics import Interval, PairedTest
from ..files.folder import installed_version
from ..report.numbers import p_value, percent, points

LONGEST_NAME = 24
"""Letters of a path at the head of a column. Longer paths are numbered and listed above."""


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
