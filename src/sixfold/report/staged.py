"""The page of a run with stages: the stage table first, then the curves of each stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..errors import UserError
from .charts import Figure, learning_figures
from .headline import ShownNote, warnings
from .numbers import clock, number, percent, percent_range
from .page import render_page
from .run_record import read_run
from .untrusted import one_line

TABLE = "stages.json"
"""File of the stage table in a run's folder."""

COLUMNS = ("stage", "kind", "held-out", "95% interval", "KL to start", "reward", "tokens", "time")


@dataclass(frozen=True)
class StageView:
    """A stage on the page.

    Attributes:
        name: name of the stage.
        anchor: place of the stage on the page.
        cells: its row of the table.
        link: its own report, relative to the page.
        curves: charts of what it learned.
        warnings: its warnings.
    """

    name: str
    anchor: str
    cells: Sequence[str]
    link: str
    curves: Sequence[Figure]
    warnings: Sequence[ShownNote]


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


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as text. What was not measured is a dash."""
    low, high = row.get("low"), row.get("high")
    tokens = (row.get("tokens") or 0) + (row.get("sampled") or 0)
    found = [
        str(row.get("stage", "")),
        str(row.get("kind", "")),
        _shown(row.get("heldout"), percent),
        _NONE if low is None or high is None else percent_range(low, high),
        _shown(row.get("kl"), number),
        _shown(row.get("reward"), number),
        number(tokens) if tokens else _NONE,
        _shown(row.get("seconds"), clock),
    ]
    return [one_line(cell) for cell in found]


def screen_table(run_dir: Path) -> Table:
    """The stage table for a terminal."""
    table = Table(*COLUMNS, title="Stages", title_justify="left")
    for row in read_table(run_dir):
        table.add_row(*map(Text, cells(row)))
    return table


def render_staged(run_dir: Path) -> str:
    """The page as HTML."""
    return render_page(
        "staged.html",
        name=run_dir.resolve().name,
        columns=COLUMNS,
        stages=[_view(run_dir, row) for row in read_table(run_dir)],
        recipe=_recipe(run_dir),
    )


def _view(run_dir: Path, row: Mapping[str, Any]) -> StageView:
    name = one_line(str(row.get("stage", "")))
    run = read_run(run_dir / "stages" / name, dumps=False)
    link = f"stages/{name}/report.html"
    return StageView(name, f"stage-{name}", cells(row), link, learning_figures(run), warnings(run))


def _recipe(run_dir: Path) -> str:
    try:
        return (run_dir / "recipe.toml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


_NONE = "—"


def _known(value: object) -> bool:
    return isinstance(value, int | float)


def _shown(value: Any, form: Any) -> str:
    return form(value) if _known(value) else _NONE
