"""Rows of a file one by one: equal to `read_file`, and a bad row does not end the others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sixfold.data.files import LongLine, Row, read_file, unread_rows
from sixfold.errors import UserError

ROWS: list[dict[str, Any]] = [{"a": f"text {n}", "b": str(n)} for n in range(2500)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(path: Path) -> None:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)
        return
    if name.endswith(".jsonl"):
        data = jsonl(ROWS)
    elif name.endswith(".json"):
        data = json.dumps(ROWS).encode()
    else:
        mark = "," if name.endswith(".csv") else "\t"
        data = "\n".join(
            mark.join(row) for row in [("a", "b"), *(r.values() for r in ROWS)]
        ).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "x.jsonl.gz", "x.csv.gz"]
)
def test_rows_are_those_of_read_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path)
    rows = [read() for read in unread_rows(path)]
    assert rows == read_file(path, 0, 0)
    assert [row.fields for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(len(ROWS)))
    drawn = read_file(path, 40, 7)
    assert drawn == [rows[row.number] for row in drawn]


def outcomes(unread: Iterator[Any]) -> list[Row | UserError]:
    found: list[Row | UserError] = []
    for read in unread:
        try:
            found.append(read())
        except UserError as error:
            found.append(error)
    return found


def test_a_bad_line_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(ROWS[:1]) + b"{\n\xff\n" + jsonl(ROWS[1:2]))
    first, second, third, fourth = outcomes(unread_rows(path))
    assert isinstance(first, Row) and isinstance(fourth, Row)
    assert fourth.number == 3
    assert f"{path}:2: invalid JSON" in str(second)
    assert f"{path}:3: invalid UTF-8 at byte 0" in str(third)
    with pytest.raises(UserError, match=r"x\.jsonl:2"):
        read_file(path, 0, 0)


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    long = json.dumps({"a": "x" * 3_000_000, "b": ""}).encode()
    path.write_bytes(jsonl(ROWS[:1]) + long + b"\n" + jsonl(ROWS[1:2]) + long)
    first, second, third, fourth = outcomes(unread_rows(path, 100))
    assert isinstance(first, Row) and isinstance(third, Row)
    assert isinstance(second, LongLine) and isinstance(fourth, LongLine)
    assert third.fields == ROWS[1]
    exact = len(json.dumps(ROWS[0])) + 1
    assert isinstance(outcomes(unread_rows(path, exact))[0], Row)
    assert isinstance(outcomes(unread_rows(path, exact - 1))[0], LongLine)


def test_a_file_that_ends_too_early_fails_after_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    data = gzip.compress(jsonl(ROWS))
    path.write_bytes(data[: len(data) // 2])
    rows = []
    with pytest.raises(UserError, match="damaged or truncated"):
        rows += [read() for read in unread_rows(path)]
    unread = unread_rows(path)
    assert next(unread)().fields == ROWS[0]


def test_an_unreadable_row_of_parquet_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    days = pyarrow.array([1, 2**40, 3], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"a": ["x", "y", "z"], "day": days}), path)
    first, second, third = outcomes(unread_rows(path))
    assert isinstance(first, Row) and isinstance(third, Row)
    assert third.fields["a"] == "z"
    assert "row 2: a value has no form in Python" in str(second)


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    """Python's own count of what is allocated, which does not depend on the machine."""
    import tracemalloc

    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(jsonl([{"a": "x" * 1000, "b": str(n)} for n in range(500)]))
    tracemalloc.start()
    count = sum(1 for read in unread_rows(path) if read())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 2e6  # the file has 20 MB


def test_a_prompt_in_the_column_prompt_needs_no_setting(tmp_path: Path) -> None:
    from sixfold.data.sources import load_tasks
    from sixfold.recipe.schema import DataConfig

    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl([{"prompt": "1+1?", "answer": "2"}]))
    (task,) = load_tasks(
        DataConfig(source=str(path), heldout=0), seed=0, rewards=("short_answer",)
    ).train
    assert (task.prompt, task.answer) == ("1+1?", "2")
