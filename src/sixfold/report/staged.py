"""The page of a run with stages: the stage table first, then the curves of each stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from .charts import Figure, learning_figures
from .headline import ShownNote, other_notes, warnings
from .numbers import clock, number, percent, points
from .page import render_page
from .run_record import read_run
from .untrusted import one_line

TABLE = "stages.json"
"""File of the stage table in a run's folder."""

_NONE = "—"
INTERVAL = "95% interval"
COLUMNS = (
    *("stage", "kind", "held-out", INTERVAL, "held-out loss", "KL to start", "reward"),
    *("on-policy", "tokens", "time"),
)


@dataclass(frozen=True)
class StageTable:
    """A table with a row for each stage.

    Attributes:
        columns: names of the columns. The first has the stages.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class StageView:
    """A stage on the page.

    Attributes:
        link: its own report, relative to the page.
        curves: charts of what it learned.
        notes: its warnings, and the result of its pre-flight.
    """

    name: str
    anchor: str
    link: str
    curves: Sequence[Figure]
    notes: Sequence[ShownNote]


def is_staged(run_dir: Path) -> bool:
    """True for the folder of a run with stages."""
    return (run_dir / TABLE).is_file()


def read_table(run_dir: Path) -> list[Mapping[str, Any]]:
    """Rows of the stage table.

    Raises:
        UserError: if the file is missing or damaged.
    """
    try:
        rows = json.loads((run_dir / TABLE).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / TABLE} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{run_dir / TABLE} is not a list of stages")
    return rows


def stage_times(run_dir: Path) -> dict[str, str]:
    """Time that each finished stage of a run took. Empty if there is no such run.

    Raises:
        UserError: as `read_table`.
    """
    rows = read_table(run_dir) if is_staged(run_dir) else []
    return {str(row["stage"]): clock(row["seconds"]) for row in rows if _known(row["seconds"])}


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as text. What was not measured is a dash."""
    low, high = row.get("low"), row.get("high")
    tokens = (row.get("tokens") or 0) + (row.get("sampled") or 0)
    found = [
        str(row.get("stage", "")),
        str(row.get("kind", "")),
        _shown(row.get("heldout"), percent),
        _NONE if low is None or high is None else f"{percent(low)[:-1]} to {percent(high)}",
        _shown(row.get("loss"), number),
        _shown(row.get("kl"), number),
        _shown(row.get("reward"), number),
        _shown(row.get("on_policy"), percent),
        number(tokens) if tokens else _NONE,
        _shown(row.get("seconds"), clock),
    ]
    return [one_line(cell) for cell in found]


def stage_tables(rows: Sequence[Mapping[str, Any]]) -> list[StageTable]:
    """The stage table, held-out accuracy by source, and verdicts of held-out completions.

    What no stage has measured has no table and no column. Below the accuracies by source are the
    differences of stages of one kind that started from the same model.
    """
    found = [
        _measured("Stages", COLUMNS, [cells(row) for row in rows]),
        _shares("Held-out tasks solved, by source", "sources", rows, _differences(rows)),
        _shares("Held-out completions, by verdict", "verdicts", rows, missing=percent(0.0)),
    ]
    return [table for table in found if table.rows]


def screen_tables(run_dir: Path) -> Group:
    """The tables for a terminal."""
    shown: list[Table | Text] = []
    for one in stage_tables(read_table(run_dir)):
        table = Table(
            *one.columns, title=one.title, title_justify="left", box=None, padding=(0, 1, 0, 0)
        )
        for column in table.columns:
            column.overflow = "fold"
            column.no_wrap = column.header == INTERVAL
        for row in one.rows:
            table.add_row(*map(Text, row))
        shown += [table, Text()]
    return Group(*shown)


def render_staged(run_dir: Path) -> str:
    """The page as HTML."""
    rows = read_table(run_dir)
    return render_page(
        "staged.html",
        name=run_dir.resolve().name,
        tables=stage_tables(rows),
        stages=[_view(run_dir, row) for row in rows],
        recipe=_recipe(run_dir),
    )


def _measured(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> StageTable:
    """The columns that have a value in some row."""
    kept = [at for at in range(len(columns)) if any(row[at] != _NONE for row in rows)]
    return StageTable(
        title, [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
    )


def _shares(
    title: str,
    key: str,
    rows: Sequence[Mapping[str, Any]],
    below: Sequence[tuple[str, Mapping[str, str]]] = (),
    missing: str = _NONE,
) -> StageTable:
    """Table of shares by name.

    Args:
        key: where a row of the stage table has the shares. Rows of earlier releases have none.
        below: further rows: what they show, and their texts by name.
        missing: text for a name that a row lacks.
    """
    measured = [(str(row["stage"]), row[key]) for row in rows if row.get(key)]
    names = list(dict.fromkeys(name for _, shares in measured for name in shares))
    shown = [(stage, {n: percent(share) for n, share in of.items()}) for stage, of in measured]
    lines = [[first, *(of.get(name, missing) for name in names)] for first, of in [*shown, *below]]
    columns = [one_line(name) for name in ("stage", *names)]
    return StageTable(title, columns, [[one_line(cell) for cell in line] for line in lines])


def _differences(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """By how many points each stage differs from the first of its kind with the same start."""
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    found = []
    for row in rows:
        if not (start := row.get("start")):
            continue
        other = first.setdefault((row["kind"], start), row)
        both = {
            name: points(share - other["sources"][name])
            for name, share in row["sources"].items()
            if row is not other and name in other["sources"]
        }
        if both:
            found.append((f"{row['stage']} - {other['stage']}", both))
    return found


def _view(run_dir: Path, row: Mapping[str, Any]) -> StageView:
    name = one_line(str(row.get("stage", "")))
    run = read_run(run_dir / "stages" / name, dumps=False)
    link = f"stages/{name}/report.html"
    checked = [note for note in other_notes(run) if note.text.startswith("pre-flight")]
    return StageView(name, f"stage-{name}", link, learning_figures(run), [*warnings(run), *checked])


def _recipe(run_dir: Path) -> str:
    try:
        return (run_dir / "recipe.toml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _known(value: object) -> bool:
    return isinstance(value, int | float)


def _shown(value: Any, form: Any) -> str:
    return form(value) if _known(value) else _NONE
