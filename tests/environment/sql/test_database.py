"""Databases for agents: which statements are allowed, and their limits."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold_environments.sql.bookshop import Change, make_bookshop
from sixfold_environments.sql.database import Database, QueryError, QueryLimits

SCRIPT = """
CREATE TABLE cups (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price INTEGER);
INSERT INTO cups VALUES (1, 'tea', 3), (2, 'coffee', 5), (3, 'milk', NULL);
"""
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def cups(writable: bool = False, **limits: float) -> Database:
    return Database.in_memory(SCRIPT, writable=writable, limits=QueryLimits(**limits))  # type: ignore[arg-type]


def kind(database: Database, statement: str) -> str:
    """Kind of a statement's error. The table must be unchanged, and the database usable."""
    before = database.table("cups")
    with pytest.raises(QueryError) as caught:
        database.run(statement)
    assert str(caught.value)
    assert database.table("cups") == before
    assert database.run("SELECT 1").text == "[[1]]"
    return caught.value.kind


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("SELECT name, price FROM cups ORDER BY id", '[["tea", 3], ["coffee", 5], ["milk", null]]'),
        ("select sum(price) from cups;", "[[8]]"),
        ("SELECT * FROM cups WHERE id = 9", "[]"),
        ("WITH t AS (SELECT 7 AS x) SELECT x FROM t", "[[7]]"),
        ("VALUES (1), (2.5)", "[[1], [2.5]]"),
        (
            "SELECT 9e999, -9e999, x'00ff', CAST(x'ff' AS TEXT)",
            '[["inf", "-inf", "x\'00ff\'", "�"]]',
        ),
        ("SELECT 'é', upper('ß')", '[["é", "ß"]]'),
        ("SELECT name FROM sqlite_schema", '[["cups"]]'),
        ("EXPLAIN QUERY PLAN SELECT * FROM cups", '[[2, 0, 0, "SCAN cups"]]'),
    ],
)
def test_a_query_returns_its_rows_as_json(statement: str, text: str) -> None:
    assert cups().run(statement).text == text


CHANGES = (
    "UPDATE cups SET price = 1",
    "DELETE FROM cups",
    "INSERT INTO cups VALUES (4, 'cocoa', 6)",
    "REPLACE INTO cups VALUES (1, 'cocoa', 6)",
    "DELETE FROM cups RETURNING *",
)


@pytest.mark.parametrize("statement", CHANGES)
def test_a_read_only_database_refuses_changes(statement: str) -> None:
    assert kind(cups(), statement) == "refused"


@pytest.mark.parametrize("statement", CHANGES)
def test_a_writable_database_is_changed(statement: str) -> None:
    database = cups(writable=True)
    before = database.table("cups")
    database.run(statement)
    assert database.table("cups") != before


def test_the_number_of_changed_rows_is_returned() -> None:
    database = cups(writable=True)
    assert database.run("UPDATE cups SET price = 7 WHERE price > 4").text == '{"changed": 1}'
    assert database.run("DELETE FROM cups WHERE id = 9").text == '{"changed": 0}'
    assert database.table("cups") == [(1, "tea", 3), (2, "coffee", 7), (3, "milk", None)]


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH '/etc/passwd' AS p",
        "ATTACH ':memory:' AS p",
        "DETACH main",
        "VACUUM",
        "VACUUM INTO '/tmp/stolen.sqlite'",
        "PRAGMA writable_schema = 1",
        "PRAGMA table_info(cups)",
        "SELECT * FROM pragma_table_info('cups')",
        "SELECT load_extension('evil')",
        "SELECT LOAD_EXTENSION('evil')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT random()",
        "SELECT hex(randomblob(4))",
        "BEGIN",
        "COMMIT",
        "SAVEPOINT a",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "CREATE TRIGGER t AFTER DELETE ON cups BEGIN SELECT 1; END",
        "DROP TABLE cups",
        "ALTER TABLE cups RENAME TO mugs",
        "INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)",
        "SELECT 1; DELETE FROM cups",
        "SELECT * FROM dbstat",
    ],
)
def test_statements_that_are_never_allowed(statement: str, writable: bool) -> None:
    assert kind(cups(writable), statement) == "refused"


@pytest.mark.parametrize(
    "statement",
    [
        "",
        " ;",
        "-- nothing",
        "SELEC 1",
        "SELECT nope FROM cups",
        "SELECT ?",
        "SELECT readfile('/etc/passwd')",
        "SELECT '\0'",
        "SELECT '\ud800'",
        "SELECT abs(-9223372036854775808)",
        "SELECT 1" + " + 1" * 500,
        "SELECT " + "(" * 900 + "1" + ")" * 900,
    ],
)
def test_a_statement_that_sqlite_cannot_run(statement: str) -> None:
    assert kind(cups(), statement) == "sql"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (f"{ENDLESS} SELECT count(*) FROM c", "too_long"),
        (f"{ENDLESS} SELECT x FROM c ORDER BY x", "too_long"),
        ("SELECT count(*) FROM cups a" + "".join(f", cups b{i}" for i in range(12)), "too_long"),
        ("SELECT zeroblob(1000000000)", "too_large"),
        ("SELECT hex(zeroblob(400000000))", "too_large"),
        ("SELECT replace(hex(zeroblob(900)), '0', hex(zeroblob(900)))", "too_large"),
        (f"{ENDLESS} SELECT group_concat(x) FROM c", "too_long"),
        ("SELECT '" + "x" * 3000 + "'", "too_large"),
        ("SELECT hex(zeroblob(400))", "too_large"),
        ("SELECT * FROM cups" + " UNION SELECT * FROM cups" * 30, "sql"),
    ],
)
def test_statements_that_would_never_end_or_fill_the_memory(statement: str, expected: str) -> None:
    database = cups(
        instructions=300_000, value_bytes=2000, characters=600, statement_characters=2000
    )
    began = time.monotonic()
    assert kind(database, statement) == expected
    assert time.monotonic() - began < 5


def test_the_wall_time_ends_a_statement() -> None:
    database = cups(instructions=10**12, seconds=0.05)
    assert kind(database, f"{ENDLESS} SELECT count(*) FROM c") == "too_long"


def test_the_rows_and_the_characters_of_a_result_are_bounded() -> None:
    numbers = f"{ENDLESS} SELECT x FROM c"
    result = cups(rows=3).run(numbers)
    assert result.rows == ((1,), (2,), (3,)) and result.more
    shown, note = result.text.split("\n")
    assert json.loads(shown) == [[1], [2], [3]] and "3" in note
    few = cups(characters=20).run(numbers)
    assert few.more and len(json.dumps(few.rows)) <= 20
    exact = cups(rows=3).run("SELECT id FROM cups")
    assert len(exact.rows) == 3 and not exact.more


def test_a_writable_database_cannot_grow_without_end() -> None:
    database = cups(writable=True, pages=16)
    grow = f"INSERT INTO cups {ENDLESS} SELECT x + 10, hex(zeroblob(400)), 1 FROM c"
    assert kind(database, grow) == "too_large"


def test_a_rule_of_the_database_is_its_own_kind_of_error() -> None:
    database = cups(writable=True)
    assert kind(database, "INSERT INTO cups VALUES (1, 'again', 1)") == "constraint"
    assert kind(database, "INSERT INTO cups VALUES (5, NULL, 1)") == "constraint"


def test_threads_take_turns() -> None:
    database = cups(writable=True)
    add = [
        threading.Thread(target=database.run, args=("UPDATE cups SET price = price + 1",))
        for _ in range(16)
    ]
    for thread in add:
        thread.start()
    for thread in add:
        thread.join()
    assert database.table("cups")[0] == (1, "tea", 19)


def test_a_file_is_opened_for_reading_only(tmp_path: Path) -> None:
    path = tmp_path / "a ?#%.sqlite"
    made = sqlite3.connect(path)
    made.executescript(SCRIPT)
    made.close()
    content = path.read_bytes()
    database = Database.file(path)
    assert database.run("SELECT count(*) FROM cups").text == "[[3]]"
    assert kind(database, "DELETE FROM cups") == "refused"
    database.close()
    assert path.read_bytes() == content


def test_full_text_tables_of_a_file_can_be_searched(tmp_path: Path) -> None:
    path = tmp_path / "texts.sqlite"
    made = sqlite3.connect(path)
    made.executescript("CREATE VIRTUAL TABLE t USING fts5(a); INSERT INTO t VALUES ('green tea');")
    made.close()
    assert Database.file(path).run("SELECT a FROM t WHERE t MATCH 'tea'").text == '[["green tea"]]'


@pytest.mark.parametrize("content", [None, b"no database, but long enough to be read as one" * 20])
def test_a_file_that_is_no_database(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "cups.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"environment\.sql\.database = .*cups\.sqlite.*Give a"):
        Database.file(path)


def test_a_change_holds_only_if_nothing_else_has_changed() -> None:
    shop = make_bookshop("0")
    first, second = shop.books[:2]
    sold = Change(updated=(first._replace(price=1),), removed=(second.id,), added=(("x", 1, 2, 3),))
    right = (
        f"UPDATE books SET price = 1 WHERE id = {first.id}",
        f"DELETE FROM books WHERE id = {second.id}",
        "INSERT INTO books VALUES (777, 'x', 1, 2, 3)",
    )

    def holds(*statements: str) -> bool:
        database = shop.database(writable=True)
        for statement in statements:
            database.run(statement)
        return sold.holds(shop, database)

    assert holds(*right)
    assert Change.from_record(json.loads(json.dumps(sold.to_record()))) == sold
    assert not holds()
    for missing in range(3):
        assert not holds(*right[:missing], *right[missing + 1 :])
    for more in (
        "UPDATE books SET stock = stock + 1 WHERE id = 3",
        "DELETE FROM books WHERE id = 3",
        "UPDATE authors SET town = 'x'",
        "DELETE FROM authors",
        "INSERT INTO books VALUES (778, 'x', 1, 2, 3)",
        "UPDATE books SET id = 999 WHERE id = 3",
    ):
        assert not holds(*right, more)
