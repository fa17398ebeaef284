"""The report of a data set: one HTML file without scripts or network access."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.report.numbers import number, percent
from sixfold.report.page import render_page
from sixfold.report.svg import Line, line_chart

from .pipeline import Result
from .settings import Settings

_NONE = "—"


@dataclass(frozen=True)
class Cells:
    """A small table."""

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


@dataclass(frozen=True)
class StageView:
    """What the page shows of a stage."""

    name: str
    anchor: str
    rows: str
    kept: str
    share: str
    metric: str
    value: str
    alarm: str
    reasons: Cells
    figures: Sequence[tuple[str, Cells]]
    examples: Sequence[Mapping[str, str]]


def render_report(settings: Settings, results: Sequence[Result]) -> str:
    """The page.

    Args:
        settings: settings of the recipe.
        results: what each stage has done.
    """
    shown: dict[str, Any] = settings.model_dump(mode="json", exclude_defaults=True, exclude={"out"})
    first, last = results[0], results[-1]
    left = [(at, one.kept / first.rows) for at, one in enumerate(results)]
    most = max(1.0, *(share for _, share in left))  # above 1 with copies
    return render_page(
        "curation.html",
        "sixfold_curation",
        name=shown["name"],
        facts=[
            ("rows read", f"{first.rows:,}"),
            ("rows kept", f"{last.kept:,} ({percent(last.kept / first.rows)})"),
            ("sources", ", ".join(f"{one['label']} ({one['origin']})" for one in shown["sources"])),
            ("seed", str(shown.get("seed", 0))),
        ],
        alarms=[(one.name, one.alarm) for one in results if one.alarm],
        stages=[_view(one) for one in results],
        chart=line_chart([Line("rows left", left, dots=True)], percent, (0.0, most)),
        settings=json.dumps(shown, indent=2, ensure_ascii=False),
    )


def _view(one: Result) -> StageView:
    fates = (("dropped", one.dropped), ("kept", one.noted))
    reasons = [(fate, name, f"{n:,}") for fate, counts in fates for name, n in counts.items()]
    return StageView(
        name=one.name,
        anchor=f"stage-{one.name}",
        rows=f"{one.rows:,}",
        kept=f"{one.kept:,}",
        share=_NONE if one.share is None else percent(one.share),
        metric=one.metric,
        value=value_text(one.value),
        alarm=one.alarm,
        reasons=Cells(("fate", "reason", "rows"), reasons),
        figures=_tables(one.figures),
        examples=one.examples,
    )


def value_text(value: float | None) -> str:
    """A health metric as text."""
    return _NONE if value is None else number(value)


def _tables(figures: Mapping[str, Any]) -> list[tuple[str, Cells]]:
    """Figures as tables: single numbers in one, each mapping and each list in one of its own."""
    single = [(name, _cell(value)) for name, value in figures.items() if not _is_many(value)]
    tables = [("Figures", Cells(("figure", "value"), single))] if single else []
    for name, value in figures.items():
        if isinstance(value, Mapping) and value:
            cells = [(str(key), _cell(one)) for key, one in value.items()]
            tables.append((name, Cells(("", "value"), cells)))
        elif _is_many(value) and value and all(isinstance(one, Mapping) for one in value):
            columns = list(dict.fromkeys(key for one in value for key in one))
            rows = [[_cell(one.get(key)) for key in columns] for one in value]
            tables.append((name, Cells(columns, rows)))
        elif _is_many(value) and value:
            listed = [one if isinstance(one, list | tuple) else [one] for one in value]
            rows = [[_cell(cell) for cell in one] for one in listed]
            tables.append((name, Cells([""] * max(map(len, rows)), rows)))
    return tables


def _is_many(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _cell(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
