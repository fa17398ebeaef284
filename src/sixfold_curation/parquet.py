"""Rows as a Parquet file, whatever types their columns have.

Arrow wants one type per column. A column in which rows disagree, such as text in one source and a
list in another, is written as JSON text, and so is one without a type in Parquet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sixfold.errors import UserError, one_line
from sixfold.files.durable import disk_errors, faultpoint, fsync_path

from .stage import Record


def write_parquet(path: Path, rows: Iterable[Record], group: int) -> None:
    """Write rows. The file appears whole or not at all.

    Args:
        path: the file.
        rows: read twice, once for the types of the columns.
        group: rows of a row group.

    Raises:
        UserError: the disk refuses.
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
    """Type of each column, in the order in which they appear."""
    import pyarrow

    types: dict[str, Any] = {}
    for batch in _groups(rows, group):
        for name in dict.fromkeys(name for fields in batch for name in fields):
            found = _type([fields.get(name) for fields in batch])
            known = types.get(name, pyarrow.null())
            types[name] = _common(known, found)
    return {name: _storable(kind) for name, kind in types.items()}


def _type(values: Sequence[Any]) -> Any:
    import pyarrow

    try:
        return pyarrow.infer_type(values)
    except (pyarrow.ArrowException, OverflowError):
        return pyarrow.string()


def _common(one: Any, other: Any) -> Any:
    import pyarrow

    schemas = [pyarrow.schema([("column", kind)]) for kind in (one, other)]
    try:
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field("column").type
    except pyarrow.ArrowException:
        return pyarrow.string()


def _storable(kind: Any) -> Any:
    """The type, or text for one that Parquet lacks: nulls alone, objects without fields."""
    import pyarrow

    return pyarrow.string() if _has_nothing(kind) else kind


def _has_nothing(kind: Any) -> bool:
    import pyarrow.types as kinds

    if kinds.is_struct(kind):
        return not kind.num_fields or any(_has_nothing(field.type) for field in kind.fields)
    if kinds.is_list(kind):
        return _has_nothing(kind.value_type)
    return bool(kinds.is_null(kind))


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
