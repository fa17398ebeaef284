"""Rows of .jsonl, .json and .parquet files, each with the place it came from, so that an error can name it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sixfold.errors import UserError

FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """A row and where it stands: "data/train.jsonl:17" or "row 3 of train"."""

    where: str
    fields: dict[str, Any]


def read_file(path: Path, limit: int) -> list[Row]:
    """The rows of a file, at most `limit` of them (0: all). Raises UserError with the line (and column) that is wrong."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}; want {', '.join(FILE_TYPES)}")
    return list(islice(readers[path.suffix](path), limit or None))


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _row(where, _decoded(where, line.rstrip(b"\r\n")), truncated=not line.endswith(b"\n"))


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parsed(str(path), _decoded(str(path), path.read_bytes()))
    if not isinstance(rows, list):
        raise UserError(f"{path}: want a list of objects, got {json_type(rows)}")
    for number, fields in enumerate(rows, start=1):
        yield _checked(f"{path}: row {number}", fields)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
    for number, fields in enumerate(rows, start=1):
        yield Row(f"{path}: row {number}", fields)


def _row(where: str, text: str, truncated: bool) -> Row:
    return _checked(where, _parsed(where, text, " (file truncated?)" if truncated else ""))


def _checked(where: str, fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise UserError(f"{where}: want an object, got {json_type(fields)}")
    return Row(where, fields)


def _parsed(where: str, text: str, hint: str = "") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"{where}: invalid JSON at {line}column {error.colno}{hint}: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{where}: invalid JSON: nested too deeply") from error


def _decoded(where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: invalid UTF-8 at byte {error.start}") from error


def json_type(value: Any) -> str:
    """The type of a value in the words of a data file: null, str, list, object, ..."""
    return {"NoneType": "null", "dict": "object"}.get(type(value).__name__, type(value).__name__)
