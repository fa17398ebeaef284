"""Files of JSON lines, packed, that appear whole or not at all; and the rows in them."""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zstandard

from sixfold.errors import UserError
from sixfold.files.durable import disk_errors, faultpoint, fsync_path

from .stage import Record

_BUFFER = 1 << 20
_LINE = "_line"
"""Attribute of a record that has its line."""

_LEVEL = 1
"""Of zstandard: the fastest packs rows to a third."""


json_text = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode
"""JSON on one line. Raises ValueError or TypeError for a value without a form in JSON."""


class LineWriter:
    """Context manager that writes a file of JSON lines. Leaving it with an error leaves no file.

    Args:
        path: the file. Packed if its name ends with .zst.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Always the same name: what a killed process has left is overwritten, and does not pile up.
        self._partial = path.with_name(f".{path.name}.partial")
        self.lines = 0

    def __enter__(self) -> Self:
        with disk_errors(f"cannot write {self._path}"):
            self._file: Any = self._partial.open("wb")
            if self._path.suffix == ".zst":
                packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
                self._file = packer.stream_writer(self._file)
            self._file = io.BufferedWriter(self._file, _BUFFER)
        return self

    def write(self, value: Any) -> None:
        """Write one line.

        Raises:
            UserError: the disk refuses it.
            ValueError, TypeError: the value has no form in JSON.
        """
        self.write_line(json_text(value).encode())

    def write_line(self, line: bytes) -> None:
        """Write one line, given without its end."""
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            with disk_errors(f"cannot write {self._path}"):
                raise error
        self.lines += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with disk_errors(f"cannot write {self._path}"):
            self._file.close()
            if error:
                self._partial.unlink(missing_ok=True)
                return
            faultpoint("curation.written")
            fsync_path(self._partial)
            os.replace(self._partial, self._path)
            faultpoint("curation.renamed")
            fsync_path(self._path.parent)


def read_lines(path: Path, count: int) -> Iterator[Any]:
    """The values of a packed file of JSON lines.

    Args:
        path: the file.
        count: number of its lines.

    Raises:
        UserError: it is missing or damaged.
    """
    return (json.loads(line.decode()) for line in counted_lines(path, count))


def counted_lines(path: Path, count: int) -> Iterator[bytes]:
    """The lines of a packed file that has `count` of them. Raises like `packed_lines`."""
    found = 0
    for line in packed_lines(path):
        found += 1
        yield line
    if found != count:
        raise UserError(f"{path} has {found} lines, expected {count}: delete its folder")


def packed_lines(path: Path) -> Iterator[bytes]:
    """The lines of a packed file.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as unpacked:
            yield from io.BufferedReader(unpacked, _BUFFER)  # type: ignore[arg-type]
    except (OSError, zstandard.ZstdError) as error:
        raise UserError(f"{path} is missing or damaged ({error}): delete its folder") from error


class StoredRows:
    """Rows in a file. Each iteration reads them anew.

    A line has the number and the place of a row, a tab, and its fields.

    Args:
        path: the file.
        count: number of rows.
        numbers: their numbers. None: they are read from the file when they are needed.
    """

    def __init__(self, path: Path, count: int, numbers: Sequence[int] | None = None) -> None:
        self._path = path
        self._count = count
        self._numbers = numbers

    @property
    def numbers(self) -> Sequence[int]:
        if self._numbers is None:
            heads = (line.partition(b"\t")[0] for line in self._lines())
            self._numbers = array("q", (json.loads(head)[0] for head in heads))
        return self._numbers

    def fields_as_json(self) -> Iterator[bytes]:
        """The fields of each row as they are stored."""
        return (line.partition(b"\t")[2].rstrip(b"\n") for line in self._lines())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        for line in self._lines():
            head, _, body = line.decode().partition("\t")
            number, where = json.loads(head)
            record = record_of(number, where, json.loads(body))
            # `dataclasses.replace` makes a record without this attribute.
            object.__setattr__(record, _LINE, line[:-1])
            yield record

    def _lines(self) -> Iterator[bytes]:
        return counted_lines(self._path, self._count)


def stored(record: Record) -> bytes:
    """The line of a row, without its end.

    Raises:
        ValueError: its texts differ from its fields, which are what is written; or a value has no
            form in JSON.
        TypeError: a value has no form in JSON.
    """
    line: bytes | None = vars(record).get(_LINE)
    if line is not None:
        return line
    fields = record.fields
    told = (fields["id"], fields["source"], prompt_text(fields), answer_text(fields))
    if told != (record.id, record.source, record.prompt, record.answer):
        raise ValueError(f"{record.where}: id, source, prompt and answer differ from the fields")
    return row_line(record.number, record.where, json_text(fields))


def row_line(number: int, where: str, fields: str) -> bytes:
    """The line of a row whose fields are given as JSON, without its end."""
    return f"{json_text([number, where])}\t{fields}".encode()


def record_of(number: int, where: str, fields: Mapping[str, Any]) -> Record:
    """The record of a row that has the columns of a data set.

    Args:
        number: its position.
        where: its place for messages.
        fields: its columns.
    """
    texts = prompt_text(fields), answer_text(fields)
    return Record(number, fields["id"], fields["source"], where, *texts, fields)


def prompt_text(fields: Mapping[str, Any]) -> str:
    """Text of a row's prompt: of messages, all but that of the system."""
    return _text(fields["prompt"])


def answer_text(fields: Mapping[str, Any]) -> str:
    """Text of a row's answer. Without one, that of its completions, the better one first."""
    answer = fields["answer"]
    if answer is None and "chosen" in fields and "rejected" in fields:
        return f"{_text(fields['chosen'])}\n\n{_text(fields['rejected'])}"
    return _text(answer)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, dict) and "content" in value:
        value = [value]
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        said = [one for one in value if one.get("role") != "system"]
        if all(isinstance(one.get("content"), str) for one in said):
            return "\n\n".join(one["content"] for one in said)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return json.dumps(value, ensure_ascii=False)
