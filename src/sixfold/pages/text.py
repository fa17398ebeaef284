"""Outcomes of labs as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..report.numbers import number
from ..report.untrusted import one_line
from .lab import Lab, Outcome, Setting, Table, Value

LONGEST_LIST = 16
"""Most numbers of a list that are printed; --json prints all."""


def shown(value: Value) -> str:
    """A value for people: numbers with three significant digits, None as a dash."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if abs(value) < 10_000 else number(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return one_line(value, limit=1000)
    cut = ", ".join(shown(item) for item in value[:LONGEST_LIST])
    rest = len(value) - LONGEST_LIST
    return f"{cut}, and {rest} more" if rest > 0 else cut


def written(setting: Setting) -> str:
    """A setting as the command line accepts it: exact, not rounded."""
    if isinstance(setting, bool):
        return "on" if setting else "off"
    if isinstance(setting, float):
        return f"{setting:g}" if float(f"{setting:g}") == setting else repr(setting)
    return one_line(str(setting), limit=200)


def as_text(lab: Lab, settings: Mapping[str, Setting], outcome: Outcome) -> str:
    """Title, controls, values, tables and remarks."""
    controls = "  ".join(
        f"{control.option} {written(settings[control.name])}" for control in lab.controls
    )
    width = max((len(name) for name in outcome.values), default=0) + 2
    values = "\n".join(
        f"{name.replace('_', ' '):<{width}}{shown(value)}" for name, value in outcome.values.items()
    )
    blocks = [f"{lab.title}\n{controls}", values, *map(_table, outcome.tables)]
    return "\n\n".join(block for block in [*blocks, "\n".join(outcome.lines)] if block)


def as_json(lab: Lab, settings: Mapping[str, Setting], outcome: Outcome) -> str:
    """Everything of the outcome, with exact numbers."""
    figures = [
        {"kind": type(figure).__name__.lower(), **asdict(figure)} for figure in outcome.figures
    ]
    record = {
        "lab": lab.name,
        "controls": dict(settings),
        "values": dict(outcome.values),
        "tables": [asdict(table) for table in outcome.tables],
        "figures": figures,
        "lines": list(outcome.lines),
    }
    return json.dumps(record, indent=2, allow_nan=False)


def _table(table: Table) -> str:
    rows = [list(table.columns), *([shown(cell) for cell in row] for row in table.rows)]
    right = [_numeric(table.rows, column) for column in range(len(table.columns))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(right))]
    lines = [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([table.title, *lines])


def _numeric(rows: Sequence[Sequence[Value]], column: int) -> bool:
    return all(
        row[column] is None
        or (isinstance(row[column], int | float) and not isinstance(row[column], bool))
        for row in rows
    )
