"""Rows of a CSV of published measurements."""

from __future__ import annotations

import csv
import math
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

TOKENS = "M tokens"
"""Suffix of a batch in millions of tokens."""

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

    Raises:
        UserError: if the file cannot be read, or a number is not finite or not above 0. The message
            names the line and the column. Text in a column of numbers makes its row unpredictable.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or ())
            missing = [name for name in REQUIRED if name not in columns]
            if missing:
                raise UserError(
                    f"points file {path}: column '{missing[0]}' is missing from the header."
                    f"{nearest(missing[0], columns)}"
                )
            return [_point(row, path, reader.line_num) for row in reader]
    except OSError as error:
        raise UserError(f"points file {path}: {error.strerror or error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"points file {path} is not CSV: {error}") from None


def _point(row: dict[str, str | None], path: str | Path, line: int) -> Point:
    cells = {name: (row.get(name) or "").strip() for name in (*TEXTS, *INPUTS, *TARGETS)}
    inputs = {
        name: _above_zero(cells[name], f"points file {path}, line {line}: {name}")
        for name in INPUTS
        if _is_number(cells[name].removesuffix(TOKENS))
    }
    unreadable = {name: cells[name] for name in INPUTS if cells[name] and name not in inputs}
    published: dict[str, float] = {}
    wordy = []
    for name in TARGETS:
        if not cells[name]:
            continue
        if _is_number(cells[name]):
            published[name] = _above_zero(cells[name], f"points file {path}, line {line}: {name}")
        else:
            wordy.append(name)
    texts = {name: cells[name] for name in TEXTS}
    return Point(texts, inputs, published, tuple(wordy), unreadable)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _above_zero(text: str, where: str) -> float:
    """The number in `text`, which may end with `TOKENS`."""
    value = float(text.removesuffix(TOKENS))
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{where} = '{text}' is not a finite number above 0")
    return value * (1e6 if text.endswith(TOKENS) else 1)
