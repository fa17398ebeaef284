"""SQLite databases that a policy may query: one statement at a time, within limits.

SQLite itself enforces the rules. Its authoriser refuses everything but reading and, if allowed,
changing rows. Its progress handler ends statements that run too long. Its limits bound the size of
values and of the database. The number of instructions is the first limit, because it does not
depend on the speed of the machine.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sixfold.errors import UserError

from .guard import CHECKED_EVERY, Guard

_BUSY_S = 1.0
"""Seconds to wait while another program locks the database."""


class QueryError(ValueError):
    """Raised if a statement is refused or fails. The database is unchanged.

    Attributes:
        kind: "sql" (SQLite reports an error), "refused" (not allowed), "constraint" (violates a
            constraint of the schema), "too_long" (exceeds the instructions or seconds) or
            "too_large" (exceeds a size limit).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one statement.

    Attributes:
        rows: maximum number of rows of a result.
        characters: maximum number of characters of a result as JSON. Rows beyond this length are
            left out.
        instructions: maximum number of instructions of SQLite's virtual machine.
        seconds: longest wall time.
        value_bytes: maximum number of bytes of a value, and of a row that SQLite stores or sorts.
        pages: maximum number of pages (4 KiB each) of a database in memory.
        statement_characters: maximum number of characters of a statement.
    """

    rows: int = 50
    characters: int = 4000
    instructions: int = 20_000_000
    seconds: float = 2.0
    value_bytes: int = 1_000_000
    pages: int = 4096
    statement_characters: int = 10_000


@dataclass(frozen=True)
class Rows:
    """Result of a statement.

    Attributes:
        rows: values of the rows that fit the limits. Empty for a statement without a result.
        more: True if there are more rows.
        changed: number of rows that were inserted, updated or deleted. None for a query.
    """

    rows: tuple[tuple[object, ...], ...] = ()
    more: bool = False
    changed: int | None = None

    @property
    def text(self) -> str:
        """JSON of the rows, or of the number of changed rows.

        If rows are left out, a second line says so.

        For example `[["tea", 3]]`, or `{"changed": 1}`.
        """
        if self.changed is not None:
            return json.dumps({"changed": self.changed})
        shown = json.dumps(self.rows, ensure_ascii=False)
        if not self.more:
            return shown
        return f"{shown}\n(only the first {len(self.rows)} rows; use a condition or LIMIT)"


class Database:
    """A SQLite database with the rules above. It is thread-safe: statements run one at a time.

    Args:
        connection: an open connection in autocommit mode. `close` closes it.
        writable: whether statements may insert, update and delete rows. They never change the
            schema.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        writable: bool = False,
        limits: QueryLimits = QueryLimits(),
    ) -> None:
        self._connection = connection
        self._writable = writable
        self._limits = limits
        self._lock = threading.Lock()
        self._guard = Guard(writable=writable)
        connection.text_factory = _text
        connection.execute(f"PRAGMA max_page_count = {limits.pages}").close()
        for name, value in _bounds(limits).items():
            connection.setlimit(name, value)
        connection.set_authorizer(self._guard.authorise)
        connection.set_progress_handler(self._guard.progress, CHECKED_EVERY)

    @classmethod
    def in_memory(
        cls, script: str, *, writable: bool = False, limits: QueryLimits = QueryLimits()
    ) -> Self:
        """Create a database in memory.

        Args:
            script: trusted SQL that creates and fills the tables.
        """
        connection = _in_memory()
        connection.executescript(script)
        return cls(connection, writable=writable, limits=limits)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the database for a branch of an episode. A read-only database is shared."""
        if not self._writable:
            return self
        connection = _in_memory()
        with self._lock:
            self._connection.backup(connection)
        return type(self)(connection, writable=True, limits=self._limits)

    @classmethod
    def file(cls, path: Path) -> Self:
        """Open a file for reading.

        Raises:
            UserError: if the file cannot be read, or is not a SQLite database.
        """
        where = f"environment.sql.database = {str(path)!r}"
        if not path.is_file():
            raise UserError(f"{where}: there is no such file. Give a SQLite database")
        try:
            connection = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro",
                uri=True,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=0,
            )
            try:
                _open_virtual_tables(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise UserError(
                f"{where} cannot be opened for reading ({error}). Give a SQLite database whose"
                " journal mode is not WAL, or whose folder is writable"
            ) from error
        return cls(connection)

    def run(self, statement: str) -> Rows:
        """Run one statement.

        Raises:
            QueryError: if the statement is refused, fails or exceeds a limit.
        """
        limits = self._limits
        if len(statement) > limits.statement_characters:
            raise QueryError(
                "too_large", f"the statement is over {limits.statement_characters} characters"
            )
        with self._lock:
            self._guard.begin(instructions=limits.instructions, seconds=limits.seconds)
            try:
                with closing(self._connection.cursor()) as cursor:
                    return self._result(cursor.execute(statement))
            except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
                raise self._error(error) from error
            finally:
                self._guard.trusted = True

    def table(self, name: str) -> list[tuple[object, ...]]:
        """All rows of a table, ordered by `id`. The rules and limits do not apply.

        Args:
            name: name of a table with the key `id`.
        """
        with self._lock:
            return self._connection.execute(f'SELECT * FROM "{name}" ORDER BY id').fetchall()

    def close(self) -> None:
        """Close the connection. A database in memory is lost."""
        with self._lock:
            self._connection.close()

    def _result(self, cursor: sqlite3.Cursor) -> Rows:
        if cursor.description is None:
            if cursor.rowcount < 0:
                raise QueryError("sql", "there is no statement")
            return Rows(changed=cursor.rowcount)
        rows: list[tuple[object, ...]] = []
        room = self._limits.characters
        for row in cursor:
            shown = tuple(map(_to_json, row))
            room -= len(json.dumps(shown, ensure_ascii=False)) + 2
            if len(rows) == self._limits.rows or (rows and room < 0):
                return Rows(tuple(rows), more=True)
            if room < 0:
                raise QueryError(
                    "too_large",
                    f"the first row is over {self._limits.characters} characters; select fewer"
                    " columns, or a part of a value with substr",
                )
            rows.append(shown)
        return Rows(tuple(rows))

    def _error(self, error: Exception) -> QueryError:
        if isinstance(error, QueryError):
            return error
        if self._guard.stopped:
            return QueryError(
                "too_long", f"{self._guard.stopped}. Use conditions that select fewer rows"
            )
        if self._guard.refused:
            return QueryError("refused", self._guard.refused)
        message = str(error) or type(error).__name__
        if "one statement at a time" in message:
            return QueryError("refused", "several statements. Run one at a time")
        if isinstance(error, sqlite3.IntegrityError):
            return QueryError("constraint", message)
        if isinstance(error, MemoryError | sqlite3.DataError) or message.endswith("is full"):
            return QueryError("too_large", f"a value or the database is too large ({message})")
        return QueryError("sql", message)


def _open_virtual_tables(connection: sqlite3.Connection) -> None:
    """Read the schema, and connect virtual tables such as full-text indexes.

    Connecting a virtual table needs the same permissions as changing the schema, which the
    authoriser refuses later. A table whose module is missing stays unusable.

    Raises:
        sqlite3.Error: if the schema cannot be read.
    """
    found = connection.execute(
        "SELECT name FROM sqlite_schema WHERE sql LIKE 'CREATE VIRTUAL TABLE%'"
    ).fetchall()
    for (name,) in found:
        quoted = str(name).replace('"', '""')
        with suppress(sqlite3.Error):
            connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 0').close()


def _bounds(limits: QueryLimits) -> dict[int, int]:
    """Limits that SQLite enforces itself: code of `setlimit` -> value."""
    return {
        sqlite3.SQLITE_LIMIT_LENGTH: limits.value_bytes,
        sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * limits.statement_characters,
        sqlite3.SQLITE_LIMIT_COLUMN: 100,
        sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
        sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
        sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
        sqlite3.SQLITE_LIMIT_ATTACHED: 0,
        sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
        sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 100,
        sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    }


def _text(raw: bytes) -> str:
    """Decode a text value, which may have bytes that are not UTF-8."""
    return raw.decode("utf-8", errors="replace")


def _in_memory() -> sqlite3.Connection:
    return sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
    )


def _to_json(value: object) -> object:
    """Convert a value to one that JSON can represent."""
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
