"""Bad input in 40 forms. A row is counted, with its number and the reason; a file is refused."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from made_sets import curate, provenance, read_rows, source_text, write_lines, write_recipe
from pyarrow import parquet

GOOD = {"question": "1+1?", "answer": "2"}
NESTED: Any = "x"
for _ in range(200):
    NESTED = [NESTED]


def line(**more: Any) -> bytes:
    return json.dumps({**GOOD, **more}).encode() + b"\n"


LINES: dict[str, tuple[bytes, str, str]] = {
    "latin-1": ('{"question": "café?", "answer": "2"}\n'.encode("latin-1"), "unreadable", "UTF-8"),
    "utf-16": (json.dumps(GOOD).encode("utf-16-le") + b"\n", "unreadable", "."),
    "zero bytes": (b"\0\0\0\n", "unreadable", "JSON"),
    "no JSON": (b"{question\n", "unreadable", "JSON at column"),
    "a list": (b"[1, 2]\n", "unreadable", "object, got list"),
    "a number": (b"17\n", "unreadable", "object, got int"),
    "null": (b"null\n", "unreadable", "object, got null"),
    "duplicate key": (b'{"answer": "1", "answer": "2"}\n', "unreadable", "duplicate key"),
    "NaN": (line(x=float("nan")), "unreadable", "NaN"),
    "1e999": (b'{"question": "a", "answer": 1e999}\n', "unreadable", "too large"),
    "long integer": (b'{"question": "a", "answer": ' + b"9" * 5000 + b"}\n", "unreadable", "5,000"),
    "deep JSON": (b'{"question": ' + b"[" * 100_000 + b"\n", "unreadable", "deep"),
    "nested 200 deep": (line(x=NESTED), "bad_value", "'x' is nested more than 100"),
    "lone surrogate": (b'{"question": "\\ud800", "answer": "2"}\n', "bad_value", "surrogate"),
    "surrogate in a list": (line(x=[{"y": "\udc80"}]), "bad_value", "'x'.*surrogate"),
    "surrogate in a key": (
        b'{"question": "a", "answer": "2", "\\ud800": 1}\n',
        *("bad_value", "surrogate"),
    ),
    "pickle": (line(x="gASVBAAAAAAAAABLAS4="), "bad_value", "'x' is a pickle"),
    "no prompt column": (b'{"answer": "2"}\n', "missing_column", "'question'"),
    "no answer column": (b'{"question": "2"}\n', "missing_column", "'answer'"),
    "null prompt": (line(question=None), "no_prompt", "'question' is empty"),
    "empty prompt": (line(question=" \n"), "no_prompt", "'question' is empty"),
    "number as prompt": (line(question=3), "malformed", "neither text nor"),
    "object as prompt": (line(question={"a": 1}), "malformed", "neither text nor"),
    "null answer": (line(answer=None), "no_answer", "'answer'"),
    "empty answer": (line(answer=""), "no_answer", "'answer'"),
    "empty list as answer": (line(answer=[]), "no_answer", "'answer'"),
    "unknown role": (line(question=[{"role": "x", "content": "a"}]), "malformed", "role 'x'"),
    "message without text": (line(question=[{"role": "user"}]), "malformed", "message"),
    "empty message": (line(question=[{"role": "user", "content": " "}]), "malformed", "empty"),
    "image": (
        line(question=[{"role": "user", "content": [{"type": "image"}]}]),
        *("malformed", "image"),
    ),
    "only a reply": (line(question=[{"role": "assistant", "content": "a"}]), "no_prompt", "."),
    "too long": (line(x="a" * 300_000), "too_long", "200,000"),
}


@pytest.mark.parametrize(("bad", "reason", "note"), LINES.values(), ids=LINES)
def test_a_bad_row_is_counted_with_its_number_and_the_next_one_is_read(
    tmp_path: Path, bad: bytes, reason: str, note: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line() + bad + line())
    recipe = write_recipe(tmp_path, source_text(path), head="longest_row = 200000")
    assert curate(recipe) == 0
    assert len(read_rows(tmp_path / "out" / "train.jsonl")) == 2
    first, second, third = provenance(tmp_path / "out")
    assert (first["fate"], second["fate"], third["fate"]) == ("kept", "dropped", "kept")
    assert second["stage"] == "sources"
    assert second["where"] in (f"{path}:2", f"{path}: row 2")
    assert second["reason"] == reason
    assert re.search(note, second["note"])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"][0]["alarm"]  # a third of the rows


@pytest.mark.parametrize("name", ["latin-1", "no prompt column", "null answer", "nested 200 deep"])
def test_bad_rows_can_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line() + LINES[name][0] + line())
    recipe = write_recipe(tmp_path, source_text(path), head='bad_rows = "refuse"')
    assert curate(recipe) == 2
    assert f"{path}:2" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.jsonl").exists()


def utf16(path: Path) -> None:
    path.write_bytes(json.dumps(GOOD).encode("utf-16") + b"\n")


def truncated(path: Path) -> None:
    data = gzip.compress(b"".join(line(n=n) for n in range(5000)))
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1 and no more")


def header_only(path: Path) -> None:
    path.write_text("question,answer\n")


def twice(path: Path) -> None:
    path.write_text("question,question\na,b\n")


def not_there(path: Path) -> None:
    return None


FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "UTF-16": ("a.jsonl", utf16, r"none of 1 rows.*UTF-16: save it as UTF-8"),
    "truncated": ("a.jsonl.gz", truncated, r"damaged or truncated.*\(after row \d+\)"),
    "no gzip": (
        "a.jsonl.gz",
        lambda path: path.write_bytes(line()),
        "Not a gzipped|cannot be read",
    ),
    "empty": ("a.jsonl", empty, "has no rows"),
    "empty json": ("a.json", empty, "the file is empty"),
    "empty csv": ("a.csv", empty, "the file is empty"),
    "header alone": ("a.csv", header_only, "has no rows"),
    "column twice": ("a.csv", twice, "duplicate column 'question'"),
    "object as json": ("a.json", lambda path: path.write_text("{}"), "expected a list"),
    "no parquet": ("a.parquet", no_parquet, "not a readable parquet file"),
    "other type": ("a.xlsx", empty, r"cannot read .xlsx; expected .jsonl"),
    "no such file": ("a.jsonl", not_there, "no such file"),
}


@pytest.mark.parametrize(("name", "write", "message"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    write: Callable[[Path], Any],
    message: str,
) -> None:
    write(tmp_path / name)
    assert curate(write_recipe(tmp_path, source_text(tmp_path / name))) == 2
    (told,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
    assert name in told
    assert re.search(message, told)


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line())
    assert curate(write_recipe(tmp_path, source_text(path))) == 0
    assert read_rows(tmp_path / "out" / "train.jsonl")[0]["prompt"] == "1+1?"


@pytest.mark.slow
def test_a_line_of_100_megabytes_is_counted_and_never_in_memory(tmp_path: Path) -> None:
    """The size of what Python allocates is measured, so the test does not depend on the machine."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(line() + b'{"question": "')
        for _ in range(100):
            file.write(b"a" * 1_000_000)
        file.write(b'"}\n' + line())
    tracemalloc.start()
    assert curate(write_recipe(tmp_path, source_text(path), head="longest_row = 1000000")) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one["fate"] for one in provenance(tmp_path / "out")] == ["kept", "dropped", "kept"]
    assert peak < 30e6


def test_repeated_ids_are_renamed_and_noted(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": name} for name in ("a", "b", "a", "a", "a~2")]
    recipe = write_recipe(tmp_path, source_text(write_lines(tmp_path / "a.jsonl", rows)))
    assert curate(recipe) == 0
    found = [one["id"] for one in read_rows(tmp_path / "out" / "train.jsonl")]
    assert found == ["made/a", "made/b", "made/a~2", "made/a~3", "made/a~2~2"]
    stories = provenance(tmp_path / "out")
    assert [bool(one["decisions"]) for one in stories] == [False, False, True, True, True]
    assert stories[2]["decisions"][0]["reason"] == "renamed"


def test_parquet_of_unknown_types(tmp_path: Path) -> None:
    """Types without a form in JSON cost their row, those with one do not."""
    table = pyarrow.table(
        {
            "question": ["a?", "b?", "c?", "d?"],
            "answer": pyarrow.array([Decimal("1.50"), Decimal("2.00"), None, Decimal("4.00")]),
            "day": pyarrow.array([date(2024, 1, 2)] * 4),
            "raw": pyarrow.array([None, b"\x80", None, None], pyarrow.binary()),
            "span": pyarrow.array([None, None, None, timedelta(1)]),
            "pairs": pyarrow.array(
                [[("k", 1)]] * 4, pyarrow.map_(pyarrow.string(), pyarrow.int8())
            ),
            "score": pyarrow.array([float("nan"), 1.0, 1.0, 1.0]),
            "choice": pyarrow.array(["x", "y", "x", "x"]).dictionary_encode(),
            "nested": [{"a": {"b": [1]}}] * 4,
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    recipe = write_recipe(tmp_path, source_text(tmp_path / "a.parquet"))
    assert curate(recipe) == 0
    (read,) = read_rows(tmp_path / "out" / "train.jsonl")
    assert read["answer"] == "1.50"
    assert read["day"] == "2024-01-02"
    assert read["pairs"] == [["k", 1]]
    assert (read["score"], read["choice"], read["nested"]) == (None, "x", {"a": {"b": [1]}})
    reasons = [(one.get("reason"), one.get("note", "")) for one in provenance(tmp_path / "out")]
    assert [reason for reason, _ in reasons] == [None, "bad_value", "no_answer", "bad_value"]
    assert "'raw' has a value of type bytes" in reasons[1][1]
    assert f"{tmp_path}/a.parquet: row 2" in reasons[1][1]
    assert curate(recipe, "--set", 'sources.made.columns=["day"]') == 0
    assert len(read_rows(tmp_path / "out" / "train.jsonl")) == 3


IDS: dict[str, tuple[list[Any], list[str]]] = {
    "floats": ([3.0, None, 4.5], ["3", "4.5"]),
    "decimals": ([Decimal("3"), None, Decimal("4")], ["3", "4"]),
    "lists": ([["a"], ["b"], ["c"]], []),
    "empty": (["a", "", " "], ["a"]),
}
"""Values of the column with the ids, and the ids."""


@pytest.mark.parametrize("case", IDS)
def test_ids_of_a_named_column_are_read_or_cost_the_row(tmp_path: Path, case: str) -> None:
    values, ids = IDS[case]
    table = pyarrow.table({"question": ["a?", "b?", "c?"], "answer": ["1"] * 3, "uid": values})
    parquet.write_table(table, tmp_path / "a.parquet")
    recipe = write_recipe(tmp_path, source_text(tmp_path / "a.parquet", id_field="uid"))
    assert curate(recipe) == (0 if ids else 2)
    if ids:
        found = read_rows(tmp_path / "out" / "train.jsonl")
        assert [one["id"] for one in found] == [f"made/{one}" for one in ids]


def test_a_value_of_parquet_without_a_form_in_python_costs_its_row(tmp_path: Path) -> None:
    days = pyarrow.array([0, 2**40, 1], pyarrow.timestamp("s"))
    table = pyarrow.table({"question": ["a?", "b?", "c?"], "answer": ["1", "2", "3"], "t": days})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert curate(write_recipe(tmp_path, source_text(tmp_path / "a.parquet"))) == 0
    assert [one["fate"] for one in provenance(tmp_path / "out")] == ["kept", "dropped", "kept"]
    assert "row 2: a value has no form" in provenance(tmp_path / "out")[1]["note"]


def test_lines_of_csv_that_are_wrong_cost_their_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'question,answer\na?,1\nb?,2,3\n"c\n?",3\nd\xe9?,4\n"e"x?,5\nf?,6\n"g?,7\n')
    assert curate(write_recipe(tmp_path, source_text(path))) == 0
    read = read_rows(tmp_path / "out" / "train.jsonl")
    assert [one["prompt"] for one in read] == ["a?", "c\n?", "f?"]
    notes = [one["note"] for one in provenance(tmp_path / "out") if one["fate"] == "dropped"]
    assert [note.partition(" ")[0] for note in notes] == [f"{path}:{n}:" for n in (3, 6, 7, 9)]


def test_conversations_and_comparisons_without_a_reply_are_counted(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = write_lines(tmp_path / "c.jsonl", [{"messages": chat}, {"messages": chat[:1]}])
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
    pairs += [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    both = write_lines(tmp_path / "p.jsonl", pairs)
    sources = source_text(chats, "chats"), source_text(both, "pairs")
    assert curate(write_recipe(tmp_path, *sources)) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"][0]["dropped"] == {"no_reply": 1, "no_comparison": 1}


def test_a_share_of_bad_rows_below_one_percent_rings_no_alarm(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 199 + b"{\n" + line())
    assert curate(write_recipe(tmp_path, source_text(path)), "--strict") == 0
    path.write_bytes(line() * 97 + b"{\n" + line())
    assert curate(write_recipe(tmp_path, source_text(path)), "--strict") == 3
