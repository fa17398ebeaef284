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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedIOBase
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import UserError, nearest
from .json_text import json_type, parse_json

_TEXT_TYPES = (".jsonl", ".json", ".csv", ".tsv")
FILE_TYPES = (*_TEXT_TYPES, ".parquet", *(f"{name}.gz" for name in _TEXT_TYPES))
_DOCUMENT_TYPES = (".txt", ".txt.gz")

T = TypeVar("T")

_PIECE = 1 << 20
"""Bytes that are read at once of a line that is too long."""

_BATCH = 1000
"""Rows of a Parquet file that are in memory at once."""

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


class LongLine(UserError):
    """A line is longer than `unread_rows` was allowed to read."""


Unread = Callable[[], Row]
"""Reads one row. Raises UserError if the row is malformed; the next row can be read."""


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
        limit: number of rows to draw from the whole file by `seed`. 0: all.

    Raises:
        UserError: names the line (and column) of the mistake.
    """
    return [read() for read in drawn_again(lambda: unread_rows(path), limit, seed)]


def unread_rows(path: Path, longest: int = 0) -> Iterator[Unread]:
    """The rows of a file, in file order, none of which is read yet.

    Only a .json file is in memory as a whole.

    Args:
        longest: maximum bytes of a line of JSON. A longer one is malformed, and is not in memory.
            0: no maximum.

    Raises:
        UserError: the file as a whole cannot be read, from here on.
    """
    suffix = file_type(path)
    _check_file(path)
    if suffix not in FILE_TYPES:
        raise UserError(
            f"{path}: cannot read {suffix or 'a file without a suffix'}; expected"
            f" {', '.join(FILE_TYPES)}, or for texts {', '.join(_DOCUMENT_TYPES)}"
        )
    with _failures(path):
        if suffix.startswith(".jsonl"):
            yield from _read_jsonl(path, longest)
        else:
            yield from _READERS[suffix.removesuffix(".gz")](path)


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


def drawn_again(items: Callable[[], Iterator[T]], limit: int, seed: int) -> Iterator[T]:
    """The items that `draw` draws, none of which is held in memory. They are read twice.

    A row of Parquet that is not read yet holds a thousand others.

    Args:
        limit: number of items to draw. 0: all.
    """
    if not limit:
        return items()
    chosen = set(draw((number for number, _ in enumerate(items())), limit, seed))
    return (item for number, item in enumerate(items()) if number in chosen)


def _read_jsonl(path: Path, longest: int) -> Iterator[Unread]:
    numbers = count()
    for line_number, line in _lines(path, longest):
        where = f"{path}:{line_number}"
        if line is None:
            next(numbers)
            yield partial(_refuse, f"{where}: a line of more than {longest:,} bytes", LongLine)
        elif line.strip():
            yield partial(_json_line, where, line, next(numbers))


def _lines(path: Path, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1. None instead of one of more than `longest` bytes."""
    size = longest + 1 if longest else -1
    with _open(path) as file:
        for number in count(1):
            line = file.readline(size)
            if not line:
                return
            if longest and len(line) > longest:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_PIECE)
                yield number, None
            else:
                yield number, line


def _refuse(message: str, kind: type[UserError] = UserError) -> NoReturn:
    raise kind(message)


def _json_line(where: str, line: bytes, number: int) -> Row:
    hint = "" if line.endswith(b"\n") else " (file truncated?)"
    return _object_row(where, parse_json(where, _decode(where, line.rstrip(b"\r\n")), hint), number)


def _read_json(path: Path) -> Iterator[Unread]:
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


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Unread]:
    """Rows of a CSV file.

    Every value is text. A row that spans lines is named by its first line.
    """
    with _open(path) as raw:
        damaged: dict[int, UserError] = {}
        lines = csv.reader(_csv_lines(path, raw, damaged), delimiter=delimiter, strict=True)
        # The module's default, 131,072 characters, is shorter than some prompts.
        limit = csv.field_size_limit(_LONGEST_CELL)
        try:
            yield from _csv_rows(path, lines, damaged)
        finally:
            csv.field_size_limit(limit)


def _csv_lines(path: Path, raw: Iterable[bytes], damaged: dict[int, UserError]) -> Iterator[str]:
    """Lines as text. The error of a line that is not text is kept in `damaged`, by its number."""
    for number, line in enumerate(raw, start=1):
        try:
            yield _decode(f"{path}:{number}", line)
        except UserError as error:
            damaged[number] = error
            yield line.decode("utf-8", "replace")


def _csv_rows(path: Path, lines: Any, damaged: Mapping[int, UserError]) -> Iterator[Unread]:
    header = _csv_header(path, lines, damaged)
    numbers = count()
    while True:
        start = lines.line_num + 1
        where = f"{path}:{start}"
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            next(numbers)
            yield partial(_refuse, f"{path}:{lines.line_num}: invalid CSV: {error}")
            continue
        wrong = [damaged[n] for n in range(start, lines.line_num + 1) if n in damaged]
        if wrong:
            next(numbers)
            yield partial(_refuse, str(wrong[0]))
        elif cells and len(cells) != len(header):
            next(numbers)
            yield partial(
                _refuse,
                f"{where}: {len(cells)} values for {len(header)} columns ({', '.join(header[:5])});"
                " quote values that hold a separator",
            )
        elif cells:
            yield partial(Row, where, dict(zip(header, cells, strict=True)), next(numbers))


def _csv_header(path: Path, lines: Any, damaged: Mapping[int, UserError]) -> list[str]:
    try:
        header: list[str] = next(lines, [])
    except csv.Error as error:
        raise UserError(f"{path}:{lines.line_num}: invalid CSV: {error}") from error
    if damaged:
        raise next(iter(damaged.values()))
    if not header:
        raise UserError(
            f"{path}: the file is empty; expected a first line with the names of the columns"
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise UserError(f"{path}:1: duplicate column {repeated[0]!r}")
    return header


def _read_parquet(path: Path) -> Iterator[Unread]:
    import pyarrow
    from pyarrow import parquet

    numbers = count()
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(f"{path}: duplicate column {repeated[0]!r}")
        for table in file.iter_batches(_BATCH):
            yield from unread_table(table, "{}: row {}".format, str(path), numbers)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a readable parquet file: {str(error).splitlines()[0]}"
        ) from error


def unread_table(
    table: Any, place: Callable[[str, int], str], name: str, numbers: Iterator[int]
) -> Iterator[Unread]:
    """The rows of an Arrow table or record batch, none of which is read yet.

    Args:
        place: makes the place of a row, from `name` and its number, counted from 1.
        numbers: gives the number of each row, counted from 0.
    """
    rows = _ArrowRows(table)
    for index in range(table.num_rows):
        number = next(numbers)
        yield partial(rows.row, index, place(name, number + 1), number)


class _ArrowRows:
    """Rows of a table, all of which become values of Python when the first one is read."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @cached_property
    def _values(self) -> list[dict[str, Any]] | None:
        """None if a value has no form in Python: each row is then read alone."""
        try:
            return list(self._table.to_pylist())
        except (ValueError, OverflowError):
            # A date outside Python's range, or a struct with duplicate field names.
            return None

    def row(self, index: int, where: str, number: int) -> Row:
        if self._values is not None:
            return Row(where, self._values[index], number, padded=True)
        try:
            (fields,) = self._table.slice(index, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"{where}: a value has no form in Python: {str(error).splitlines()[0]}"
            ) from error
        return Row(where, fields, number, padded=True)


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


_READERS: dict[str, Callable[[Path], Iterator[Unread]]] = {
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}
