"""`sixfold plan --points FILE`: predictions beside published measurements.

Reads rows of a CSV file, compares every published value with its prediction, and prints both with a
summary of the errors.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sixfold.errors import UserError, nearest
from sixfold.report.untrusted import one_line

from ..constants import CONSTANTS, Constants
from ..published import INPUTS, TARGETS, TEXTS, NotPredictable, Point, predict

ABSENT = {"-", "–", "?", "n/a", "na", "nan", "none", "null"}
"""Cells of a column of numbers that say that there is none."""

_SCALES = {"": 1.0, "k": 1024.0, "m": 1e6}
_NUMBER = re.compile(
    r"[~≈]?\s*(?P<digits>[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:e[+-]?\d+)?"
    r"|\.\d+(?:e[+-]?\d+)?|inf(?:inity)?))\s*(?:(?P<scale>[KM])(?:\s*tokens)?|%|tokens)?",
    re.IGNORECASE,
)

_COLUMNS = {*TEXTS, *INPUTS, *TARGETS}

REQUIRED = ("id", "framework", "model", "workload", "gpu")
"""Columns that the header must have."""


def read_points(path: str | Path) -> list[Point]:
    """Rows of a CSV file with a header. Columns may be missing, but for those of `REQUIRED`.

    Order of columns, further columns, a byte-order mark, empty rows, and rows that start with `#`
    do not matter. Numbers may be written as `read_number` says.

    Raises:
        UserError: if the file cannot be read, or a number is not finite or not above 0. The message
            names the line and the column. Text in a column of numbers makes its row unpredictable.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            rows = (
                (reader.line_num, cells)
                for cells in reader
                if any(cell.strip() for cell in cells) and not cells[0].lstrip().startswith("#")
            )
            columns = [name.strip().lower() for name in next(rows, (0, []))[1]]
            missing = [name for name in REQUIRED if name not in columns]
            if missing:
                raise UserError(
                    f"points file {path}: column '{missing[0]}' is missing from the header."
                    f"{nearest(missing[0], columns)}"
                )
            repeated = [name for name in columns if name in _COLUMNS and columns.count(name) > 1]
            if repeated:
                raise UserError(
                    f"points file {path}: column '{repeated[0]}' occurs"
                    f" {columns.count(repeated[0])} times in the header. Keep one"
                )
            # A row may have fewer cells than the header, or more: then the last ones are ignored.
            return [_point(dict(zip(columns, row, strict=False)), path, at) for at, row in rows]
    except OSError as error:
        raise UserError(f"points file {path}: {error.strerror or error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"points file {path} is not CSV: {error}") from None


def _point(row: dict[str, str], path: str | Path, line: int) -> Point:
    cells = {name: row.get(name, "").strip() for name in (*TEXTS, *INPUTS, *TARGETS)}
    for name in (*INPUTS, *TARGETS):
        if cells[name].lower() in ABSENT:
            cells[name] = ""
    inputs: dict[str, float] = {}
    published: dict[str, float] = {}
    unreadable: dict[str, str] = {}
    wordy = []
    for name in (*INPUTS, *TARGETS):
        value = _range_middle(cells[name]) if name in TARGETS else None
        value = read_number(cells[name]) if value is None else value
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(
                f"points file {path}, line {line}: {name} = '{cells[name]}' is not a finite number"
                " above 0"
            )
        if value is not None:
            (inputs if name in INPUTS else published)[name] = value
        elif cells[name] and name in INPUTS:
            unreadable[name] = cells[name]
        elif cells[name]:
            wordy.append(name)
    texts = {name: cells[name] for name in TEXTS}
    return Point(texts, inputs, published, tuple(wordy), unreadable)


def read_number(text: str) -> float | None:
    """The number that a cell holds; None if it is text.

    Read are `~1,024` (about, thousands), `43 %`, `16K` (1024 of them), and `16M tokens`. The column
    states the unit, so a percent sign does not change the number.
    """
    shown = _NUMBER.fullmatch(text.strip())
    if shown is None:
        return None
    value = float(shown["digits"].replace(",", ""))
    return value * _SCALES[(shown["scale"] or "").lower()]


def _range_middle(text: str) -> float | None:
    """The middle of a published range such as `10-12`; None if the text is not a range."""
    ends = [read_number(end) for end in re.split(r"(?<=[\d%KMkm])\s*(?:-|–|to)\s*(?=[\d.])", text)]
    if len(ends) != 2 or ends[0] is None or ends[1] is None or ends[0] > ends[1]:
        return None
    return (ends[0] + ends[1]) / 2


SPEED = ("step_s", "tokens_s_gpu", "tokens_s_total", "tflops_gpu", "mfu_pct", "gpu_hours")
"""Columns that say how fast a row is, each from the same predicted time. The first one counts."""

PHASES = ("train_s", "gen_s", "logprob_s", "ref_s", "sync_s")
SCALE_FREE = {"n_gpus", "micro_batch"}
"""Inputs of training rows that hardly change the tokens per second and device."""

NO_NUMBER = "the published value is text, not a number"
NO_COLUMN = "no rule predicts this column of such a row"


@dataclass(frozen=True)
class Outcome:
    """One published value and its prediction.

    Attributes:
        quantity: column of the value; "" for a row with neither a number nor a prediction.
        published: the value; NaN if there is none, or if it is not a number.
        predicted: None if it is not predictable.
        leads: it is the row's first speed, or its first phase if the row has no speed.
        assumed: input columns that a rule has filled.
        reason: why it is not predictable.
    """

    point: Point
    quantity: str
    published: float
    predicted: float | None
    leads: bool = False
    assumed: tuple[str, ...] = ()
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error: predicted / published - 1. None if either number is missing."""
        if self.predicted is None or math.isnan(self.published):
            return None
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of a group of outcomes.

    Attributes:
        count: number of predicted values.
        p90: the smallest error that at least 90 % of them do not exceed.
    """

    name: str
    count: int
    median: float
    p90: float


def outcomes(points: Iterable[Point], k: Constants) -> list[Outcome]:
    """Every published value of every row.

    A row without published values gives all quantities that are predicted for it, or the reason why
    there are none.
    """
    return [outcome for point in points for outcome in _row(point, k)]


def _row(point: Point, k: Constants) -> list[Outcome]:
    try:
        prediction = predict(point, k)
    except NotPredictable as problem:
        values = _published(point) or {"": math.nan}
        return [Outcome(point, name, x, None, reason=str(problem)) for name, x in values.items()]
    order = [name for name in (*SPEED, *PHASES) if name in point.published]
    lead = next((name for name in order if name in prediction.values), "")
    assumed = tuple(name for name in prediction.assumed if name not in SCALE_FREE)
    values = _published(point) or dict.fromkeys(prediction.values, math.nan)
    return [
        Outcome(point, name, value, None, reason=NO_NUMBER)
        if name in point.wordy
        else Outcome(
            point,
            name,
            value,
            prediction.values.get(name),
            name == lead,
            assumed,
            "" if name in prediction.values else prediction.refused.get(name, NO_COLUMN),
        )
        for name, value in values.items()
    ]


def _published(point: Point) -> dict[str, float]:
    return point.published | dict.fromkeys(point.wordy, math.nan)


def errors(name: str, chosen: Iterable[Outcome]) -> Errors:
    """Median and 90th percentile (nearest rank); NaN for an empty group."""
    found = sorted(abs(o.error) for o in chosen if o.error is not None)
    if not found:
        return Errors(name, 0, math.nan, math.nan)
    half = len(found) // 2
    median = (found[half] + found[-half - 1]) / 2
    return Errors(name, len(found), median, found[math.ceil(0.9 * len(found)) - 1])


def summary(all_outcomes: Sequence[Outcome]) -> list[Errors]:
    """Errors of one value per row, of rows with and without assumed inputs, and by kind."""
    leads = [o for o in all_outcomes if o.leads]
    return [
        errors("one value per row", leads),
        errors("  all inputs published", (o for o in leads if not o.assumed)),
        errors("  some inputs assumed", (o for o in leads if o.assumed)),
        errors("  step time or throughput", (o for o in leads if o.quantity in SPEED)),
        errors("  phases and syncs only", (o for o in leads if o.quantity in PHASES)),
        errors("phases of steps", (o for o in all_outcomes if o.quantity in PHASES)),
        errors("memory", (o for o in all_outcomes if o.quantity == "mem_gib_gpu")),
        errors("every value", all_outcomes),
    ]


HEADER = ("id", "framework", "model", "gpu", "quantity", "predicted", "published", "error", "")
WIDTHS = (6, 22, 22, 12, 14, 10, 10, 7, 0)
WIDE = sum(WIDTHS) + 2 * len(WIDTHS)
"""Columns of a row without its note. On a narrower terminal a row is two lines."""


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
    if shutil.get_terminal_size((WIDE, 24)).columns >= WIDE:
        return "  ".join(shown).rstrip()
    first = "  ".join(text.strip() for text in shown[:4])
    return f"{first}\n    {'  '.join(text.strip() for text in shown[4:])}".rstrip()


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
