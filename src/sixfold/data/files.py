"""Rows of .jsonl, .json, .csv, .tsv and .parquet files, and texts of .txt files.

All but .parquet may be packed (.gz). Each row keeps the place it came from, so that errors can
name it.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError, nearest
from .json_text import json_type, parse_json

_TEXT_TYPES = (".jsonl", ".json", ".csv", ".tsv")
FILE_TYPES = (*_TEXT_TYPES, ".parquet", *(f"{name}.gz" for name in _TEXT_TYPES))
_DOCUMENT_TYPES = (".txt", ".txt.gz")

T = TypeVar("T")

_LONGEST_CELL = 2**31 - 1
"""Maximum characters of a csv value: the largest limit that the csv module accepts on every
platform.
"""


@dataclass(frozen=True)
class Row:
    """One row of a dataset.

    Args:
        where: place for error messages, such as "data/train.jsonl:17" or "row 3 of train".
        fields: column name to value.
        number: position in the file or split, counted from 0. Drawing rows does not change it.
        reply: the assistant's reply at the end of the row's conversation, which the prompt does not
            include: text, or a list of calls. None if there is none.
        padded: the row is from Arrow, which gives all objects of a column the same fields: a null
            stands for a field that the object does not have.
    """

    where: str
    fields: dict[str, Any]
    number: int
    reply: Any = None
    padded: bool = False


_Unread = Callable[[], Row]


def is_file_name(source: str) -> bool:
    """True if a source names a data file, judged by its suffix."""
    return file_type(Path(source)) in FILE_TYPES


def file_type(path: Path) -> str:
    """The suffix of a file, with the one before ".gz"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() + suffix if suffix == ".gz" else suffix


def _open(path: Path) -> BufferedIOBase:
    """A file for reading bytes, unpacked if its name says that it is packed."""
    return gzip.GzipFile(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def read_file(path: Path, limit: int, seed: int) -> list[Row]:
    """The rows of a file, in file order.

    Args:
        path: file of one of FILE_TYPES.
        limit: number of rows to draw from the whole file by `seed`. 0: all.
        seed: seed of the draw.

    Raises:
        UserError: names the line (and column) of the mistake.
    """
    suffix = file_type(path)
    _check_file(path)
    if suffix not in FILE_TYPES:
        raise UserError(
            f"{path}: cannot read {suffix or 'a file without a suffix'}; expected"
            f" {', '.join(FILE_TYPES)}, or for texts {', '.join(_DOCUMENT_TYPES)}"
        )
    with _failures(path):
        if suffix == ".parquet":
            return _read_parquet(path, limit, seed)
        return [read() for read in draw(_READERS[suffix.removesuffix(".gz")](path), limit, seed)]


def text_files(source: str) -> list[Path]:
    """The .txt files that a source names: itself, or those below a folder, by name.

    Empty if the source is something else, such as a folder that also has files of rows.
    """
    path = Path(source)
    if file_type(path) in _DOCUMENT_TYPES and not path.is_dir():
        return [path]
    below = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    if any(is_file_name(file.name) for file in below):
        return []
    return [file for file in below if file_type(file) in _DOCUMENT_TYPES]


def read_text(path: Path) -> str:
    """The text of a .txt file, with its line ends as they are.

    Raises:
        UserError: the file is missing, damaged or not UTF-8.
    """
    _check_file(path)
    with _failures(path), _open(path) as file:
        return _decode(str(path), file.read())


def _check_file(path: Path) -> None:
    """Raise UserError if there is no such file."""
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: name it without the suffix of a file, or give a file in it"
        )
    if not path.is_file():
        names = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(
            f"{path}: no such file (looked in {Path.cwd()}).{nearest(path.name, names)}"
        )


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a UserError."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the packed file is damaged or truncated: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def draw(items: Iterable[T], limit: int, seed: int) -> list[T]:
    """Draw items by `seed`, keeping their order.

    Every item has the same probability wherever it is, because files are often sorted. A larger
    limit draws the same items and more.

    Args:
        items: read once; only `limit` of them are held in memory.
        limit: number of items to draw. 0: all.
        seed: seed of the draw.
    """
    if not limit:
        return list(items)
    rank = random.Random(f"{seed}/limit").random
    kept: list[tuple[float, int, T]] = []  # a heap with the highest rank on top
    for number, item in enumerate(items):
        entry = (-rank(), number, item)
        if len(kept) < limit:
            heapq.heappush(kept, entry)
        elif entry[0] > kept[0][0]:
            heapq.heapreplace(kept, entry)
    return [item for _, _, item in sorted(kept, key=lambda entry: entry[1])]


def _read_jsonl(path: Path) -> Iterator[_Unread]:
    numbers = count()
    with _open(path) as lines:
        for line_number, line in enumerate(lines, start=1):
            if line.strip():
                yield partial(_json_line, f"{path}:{line_number}", line, next(numbers))


def _json_line(where: str, line: bytes, number: int) -> Row:
    hint = "" if line.endswith(b"\n") else " (file truncated?)"
    return _object_row(where, parse_json(where, _decode(where, line.rstrip(b"\r\n")), hint), number)


def _read_json(path: Path) -> Iterator[_Unread]:
    with _open(path) as file:
        text = _decode(str(path), file.read())
    if not text.strip():
        raise UserError(f"{path}: the file is empty; expected a list of objects")
    lines = text.count("\n{") and text.lstrip().startswith("{")
    rows = parse_json(
        str(path), text, " (one object per line? then name the file .jsonl)" if lines else ""
    )
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of objects, got {json_type(rows)}")
    for number, fields in enumerate(rows):
        yield partial(_object_row, f"{path}: row {number + 1}", fields, number)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[_Unread]:
    """Rows of a CSV file.

    Every value is text. A row that spans lines is named by its first line.
    """
    with _open(path) as raw:
        lines = csv.reader(
            (_decode(f"{path}:{n}", line) for n, line in enumerate(raw, start=1)),
            delimiter=delimiter,
            strict=True,
        )
        # The module's default, 131,072 characters, is shorter than some prompts.
        limit = csv.field_size_limit(_LONGEST_CELL)
        try:
            yield from _csv_rows(path, lines)
        except csv.Error as error:
            raise UserError(f"{path}:{lines.line_num}: invalid CSV: {error}") from error
        finally:
            csv.field_size_limit(limit)


def _csv_rows(path: Path, lines: Any) -> Iterator[_Unread]:
    header: list[str] = next(lines, [])
    if not header:
        raise UserError(
            f"{path}: the file is empty; expected a first line with the names of the columns"
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise UserError(f"{path}:1: duplicate column {repeated[0]!r}")
    numbers, start = count(), lines.line_num + 1
    for cells in lines:
        where, start = f"{path}:{start}", lines.line_num + 1
        if cells and len(cells) != len(header):
            raise UserError(
                f"{where}: {len(cells)} values for {len(header)} columns ({', '.join(header[:5])});"
                " quote values that hold a separator"
            )
        if cells:
            yield partial(Row, where, dict(zip(header, cells, strict=True)), next(numbers))


def _read_parquet(path: Path, limit: int, seed: int) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a readable parquet file: {str(error).splitlines()[0]}"
        ) from error
    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if repeated:
        raise UserError(f"{path}: duplicate column {repeated[0]!r}")
    numbers = draw(range(table.num_rows), limit, seed)
    table = table.take(numbers) if limit else table
    return [
        Row(f"{path}: row {n + 1}", fields, n, padded=True)
        for n, fields in zip(numbers, _arrow_rows(path, table, numbers), strict=True)
    ]


def _arrow_rows(path: Path, table: Any, numbers: list[int]) -> list[dict[str, Any]]:
    """The rows as Python values. `numbers` are the row numbers, for the error message."""
    try:
        return list(table.to_pylist())
    except (ValueError, OverflowError):
        # A date outside Python's range, or a struct with duplicate field names: find the row.
        rows: list[dict[str, Any]] = []
        for number in numbers:
            try:
                rows += table.slice(len(rows), 1).to_pylist()
            except (ValueError, OverflowError) as error:
                raise UserError(
                    f"{path}: row {number + 1}: a value has no form in Python:"
                    f" {str(error).splitlines()[0]}"
                ) from error
        return rows


def _object_row(where: str, fields: Any, number: int) -> Row:
    if not isinstance(fields, dict):
        raise UserError(f"{where}: expected an object, got {json_type(fields)}")
    return Row(where, fields, number)


def _decode(where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = (
            "; the file is UTF-16: save it as UTF-8"
            if data[:2] in (b"\xff\xfe", b"\xfe\xff")
            else ""
        )
        raise UserError(f"{where}: invalid UTF-8 at byte {error.start}{other}") from error


_READERS: dict[str, Callable[[Path], Iterator[_Unread]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
}
