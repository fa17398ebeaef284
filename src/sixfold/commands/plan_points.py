"""`sixfold plan --points FILE`: predictions beside published measurements."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import UserError
from ..planning.constants import CONSTANTS
from ..planning.point_summary import Errors, Outcome, outcomes, summary
from ..planning.points import read_points
from ..report.untrusted import one_line

HEADER = ("id", "framework", "model", "gpu", "quantity", "predicted", "published", "error", "")
WIDTHS = (6, 22, 22, 12, 14, 10, 10, 7, 0)


def plan_points(path: str, *, as_json: bool) -> int:
    """Print every published value with its prediction, then the summary.

    Raises:
        UserError: if the file cannot be read, has bad numbers, or no rows.
    """
    points = read_points(path)
    if not points:
        raise UserError(f"points file {path} has no rows")
    found = outcomes(points, CONSTANTS)
    if as_json:
        print(json.dumps(_record(found), indent=1))
        return 0
    print(_line(HEADER))
    for outcome in found:
        print(_line(_cells(outcome)))
    print(
        f"\n* counts in 'one value per row'\n\n{'absolute relative error':<30}n   median      90 %"
    )
    for group in summary(found):
        print(_summary_line(group))
    unpredicted = {o.point.text("id") for o in found} - {
        o.point.text("id") for o in found if o.predicted is not None
    }
    print(f"\n{len(points)} rows, {len(unpredicted)} of them not predictable")
    return 0


def _cells(outcome: Outcome) -> tuple[str, ...]:
    point, error = outcome.point, outcome.error
    note = f"not predictable: {outcome.reason}" if outcome.predicted is None else ""
    if outcome.assumed and outcome.predicted is not None:
        note = f"assumed: {', '.join(outcome.assumed)}"
    return (
        *(point.text(column) for column in ("id", "framework", "model", "gpu")),
        outcome.quantity + ("*" if outcome.leads else ""),
        "-" if outcome.predicted is None else f"{outcome.predicted:.4g}",
        "-" if math.isnan(outcome.published) else f"{outcome.published:.4g}",
        "-" if error is None else f"{100 * error:+.0f} %",
        note,
    )


def _line(cells: tuple[str, ...]) -> str:
    shown = []
    for number, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True)):
        text = one_line(cell)
        if width:
            text = text[:width].rjust(width) if 5 <= number <= 7 else text[:width].ljust(width)
        shown.append(text)
    return "  ".join(shown).rstrip()


def _summary_line(group: Errors) -> str:
    if not group.count:
        return f"{group.name:<27}{0:>4}        -         -"
    return f"{group.name:<27}{group.count:>4}{group.median:>9.1%}{group.p90:>10.1%}"


def _record(found: list[Outcome]) -> dict[str, Any]:
    return {
        "values": [
            {
                "id": o.point.text("id"),
                "quantity": o.quantity,
                "predicted": o.predicted,
                "published": None if math.isnan(o.published) else o.published,
                "error": o.error,
                "leads": o.leads,
                "assumed": list(o.assumed),
                "reason": o.reason,
            }
            for o in found
        ],
        "summary": [
            {
                "name": group.name.strip(),
                "count": group.count,
                "median": group.median if group.count else None,
                "p90": group.p90 if group.count else None,
            }
            for group in summary(found)
        ],
    }
