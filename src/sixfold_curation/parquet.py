"""Rows as a Parquet file, whatever types their columns have.

Arrow wants one type per column. A column in which rows disagree, such as text in one source and a
list in another, is written as JSON text, and so is one without a type in Parquet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any

from sixfold.errors import UserError, one_line
from sixfold.files.durable import disk_errors, faultpoint, fsync_path

from .stage import Record

_ANSWER = "answer"
"""The column whose integers stay integers beside floats: 5 and 5.0 are different answers."""

Kind = str | list[Any] | dict[str, Any]
"""What a column holds: the name of a type of Python, a list with the kind of the elements, or the
kinds of the fields of an object. "null" if nothing, "mixed" if no type of Parquet can hold it.
"""


def write_parquet(path: Path, rows: Iterable[Record], group: int) -> None:
    """Write rows. The file appears whole or not at all.

    Args:
        path: the file.
        rows: read twice, once for the types of the columns.
        group: rows of a row group.

    Raises:
        UserError: the disk refuses, or answers are lists that no column of one type can hold.
    """
    import pyarrow
    from pyarrow import parquet

    types = _types(rows, group)
    schema = pyarrow.schema(list(types.items()))
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors(f"cannot write {path}"):
        with parquet.ParquetWriter(partial, schema, compression="zstd") as file:
            for batch in _groups(rows, group):
                columns = [_array(batch, name, kind) for name, kind in types.items()]
                file.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
        faultpoint("curation.written")
        fsync_path(partial)
        os.replace(partial, path)
        faultpoint("curation.renamed")
        fsync_path(path.parent)


def _types(rows: Iterable[Record], group: int) -> dict[str, Any]:
    """Type of each column, in the order in which they appear.

    Raises:
        UserError: answers are lists, whose JSON text would be another answer, and some are not, or
            their elements have several types.
    """
    kinds: dict[str, Kind] = {}
    are_lists: set[bool] = set()
    for batch in _groups(rows, group):
        for fields in batch:
            if (answer := fields.get(_ANSWER)) is not None:
                are_lists.add(isinstance(answer, list))
            if len(are_lists) > 1:
                raise UserError(
                    f"row {fields['id']}: some answers are lists and some are not, and a column of"
                    " Parquet has one type: set format = 'jsonl'"
                )
            for name, value in fields.items():
                kinds[name] = _common(kinds.get(name, "null"), _kind(value), name == _ANSWER)
    if True in are_lists and _is_text(kinds[_ANSWER]):
        raise UserError(
            "the answers are lists whose elements have no one type in Parquet: set format = 'jsonl'"
        )
    return {name: _storable(kind) for name, kind in kinds.items()}


def _kind(value: Any) -> Kind:
    if isinstance(value, dict):
        return {name: _kind(one) for name, one in value.items()}
    if isinstance(value, list):
        kinds: list[Kind] = ["null", *map(_kind, value)]
        return [reduce(partial(_common, exact=True), kinds)]
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "mixed"
    return "null" if value is None else type(value).__name__


def _common(one: Kind, other: Kind, exact: bool) -> Kind:
    """Kind of a column with values of two kinds.

    Args:
        one: a kind.
        other: another one.
        exact: integers beside floats are "mixed". Otherwise they become floats.
    """
    if other in ("null", one):
        return one
    if one == "null":
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        names = dict.fromkeys((*one, *other))
        return {n: _common(one.get(n, "null"), other.get(n, "null"), True) for n in names}
    if isinstance(one, list) and isinstance(other, list):
        return [_common(one[0], other[0], True)]
    return "float" if {str(one), str(other)} == {"int", "float"} and not exact else "mixed"


def _storable(kind: Kind) -> Any:
    """The type in Parquet. Text, for JSON, where rows disagree or have nulls or no fields alone."""
    import pyarrow

    if _is_text(kind):
        return pyarrow.string()
    if isinstance(kind, dict):
        return pyarrow.struct([(name, _storable(one)) for name, one in kind.items()])
    if isinstance(kind, list):
        return pyarrow.list_(_storable(kind[0]))
    return {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64()}[kind]


def _is_text(kind: Kind) -> bool:
    """True for text, and for a type of which a part is mixed, or has nulls or no fields alone."""
    if isinstance(kind, dict):
        return not kind or any(one != "str" and _is_text(one) for one in kind.values())
    if isinstance(kind, list):
        return kind[0] != "str" and _is_text(kind[0])
    return kind in ("null", "mixed", "str")


def _array(batch: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Any:
    import pyarrow

    values = [fields.get(name) for fields in batch]
    if kind == pyarrow.string():
        values = [
            one if one is None or isinstance(one, str) else json.dumps(one, ensure_ascii=False)
            for one in values
        ]
    try:
        return pyarrow.array(values, kind)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"column {name!r} has no one type in Parquet ({one_line(error)}): set format = 'jsonl'"
        ) from error


def _groups(rows: Iterable[Record], size: int) -> Iterator[list[Mapping[str, Any]]]:
    fields = (record.fields for record in rows)
    while batch := list(islice(fields, size)):
        yield batch
