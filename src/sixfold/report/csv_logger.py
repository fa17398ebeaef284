"""metrics.csv: the content of metrics.jsonl as a table, for spreadsheets and data frames.

The file is rewritten from metrics.jsonl when a process opens it, and if another program changes it
during the run; each step then appends a row. Therefore a crash at any byte or a resume from any
checkpoint repairs itself, and the two files cannot disagree.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..files.durable import disk_errors, write_bytes_atomic
from .loggers import read_metrics
from .metric import Value
from .schema import METRICS


class CsvLogger:
    """Writes one row per step, on disk before `log` returns. List-valued metrics are left out.

    Columns are all single-valued keys of the schema in its order, measured or not, so they do not
    depend on the first step. Members of a family (`reward/part/*`) get columns when they first
    appear, which rewrites the whole file. An empty cell was not measured in that step. `nan` is a
    number that was not finite (null in JSON). Floats read back bit for bit.

    Args:
        records: metrics.jsonl, to which each step must be written before it is logged here.
    """

    def __init__(self, path: Path, records: Path) -> None:
        self._path = path
        self._records = records
        self._columns: list[str] = []
        self._size = 0
        self._rewrite()

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append a row.

        Raises:
            UserError: if the disk is full.
        """
        row = {**metrics, "step": step}
        changed = not self._path.is_file() or self._path.stat().st_size != self._size
        if changed or any(
            key not in self._columns and not isinstance(value, list | tuple)
            for key, value in row.items()
        ):
            self._rewrite()
            return
        line = _table([_cells(row, self._columns)])
        with disk_errors(f"cannot write {self._path}"), self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)

    def close(self) -> None:
        """Does nothing: no file is open between steps."""

    def _rewrite(self) -> None:
        records = read_metrics(self._records)
        self._columns = columns({key for record in records for key in record})
        table = _table([self._columns, *(_cells(record, self._columns) for record in records)])
        write_bytes_atomic(self._path, table)
        self._size = len(table)


def columns(seen: Iterable[str]) -> list[str]:
    """Single-valued keys in the schema's order. Families are replaced by the keys seen, sorted."""
    keys = sorted(seen)
    return [
        key
        for metric in METRICS
        if not metric.is_list
        for key in ([k for k in keys if metric.matches(k)] if metric.is_family else [metric.key])
    ]


def _cells(record: Mapping[str, Value], keys: Sequence[str]) -> list[str]:
    return [_cell(record[key]) if key in record else "" for key in keys]


def _cell(value: Value) -> str:
    return repr(value) if isinstance(value, float | int) and math.isfinite(value) else "nan"


def _table(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
