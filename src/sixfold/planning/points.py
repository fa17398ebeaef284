"""Rows of a CSV of published measurements."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, nearest

TEXTS = (
    "id", "source", "source_loc", "status", "framework", "model", "workload", "algorithm", "gpu",
    "mode", "precision", "recompute", "other_name", "notes",
)  # fmt: skip
"""Columns of text. A prediction reads them, but for `id`, `source_loc`, `status` and `other_name`.
"""

INPUTS = (
    "params_b", "active_b", "n_gpus", "gpus_train", "gpus_rollout", "train_tp", "train_cp",
    "train_ep", "train_pp", "gen_tp", "prompts_or_gbs", "samples_per_prompt", "train_gbs",
    "max_len", "avg_len", "micro_batch",
)  # fmt: skip
"""Columns of numbers that a prediction reads."""

TARGETS = (
    "tokens_s_gpu", "tokens_s_total", "step_s", "gen_s", "logprob_s", "ref_s", "train_s", "sync_s",
    "mem_gib_gpu", "tflops_gpu", "mfu_pct", "gpu_hours", "other_value",
)  # fmt: skip
"""Columns that a prediction may be compared with, and never reads."""

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


@dataclass(frozen=True)
class Point:
    """One row.

    Attributes:
        texts: columns of `TEXTS`; missing ones are "".
        inputs: numbers of `INPUTS` that the row has.
        published: numbers of `TARGETS` that the row has.
        wordy: targets whose value is text and not a number.
        unreadable: inputs whose value is text and not a number, with the text.
    """

    texts: dict[str, str]
    inputs: dict[str, float]
    published: dict[str, float]
    wordy: tuple[str, ...]
    unreadable: dict[str, str]

    def text(self, column: str) -> str:
        """Text of a column of `TEXTS`."""
        return self.texts[column]


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
