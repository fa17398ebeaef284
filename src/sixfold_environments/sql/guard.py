"""Authoriser and progress handler: allowed actions and the time limit of a statement."""

from __future__ import annotations

import math
import sqlite3
import time

CHECKED_EVERY = 1000
"""Instructions of SQLite between two checks of the limits."""

_READING = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
)
_CHANGING = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})

_REFUSED_FUNCTIONS = frozenset({"fts3_tokenizer", "load_extension", "random", "randomblob"})
"""Functions that load code, reveal memory addresses or return random values."""

_ACTIONS = {
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM INTO are",
    sqlite3.SQLITE_DETACH: "DETACH is",
    sqlite3.SQLITE_PRAGMA: "PRAGMA (the schema is in sqlite_schema) is",
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT and ROLLBACK are",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT is",
    sqlite3.SQLITE_INSERT: "INSERT is",
    sqlite3.SQLITE_UPDATE: "UPDATE is",
    sqlite3.SQLITE_DELETE: "DELETE is",
}
"""Start of the error message for each refused action."""

_SCHEMA = "changes of the schema and functions such as pragma_table_info are"


class Guard:
    """Authoriser and progress handler of one connection.

    It has no reference to the connection: a reference cycle would keep the database in memory.

    Args:
        writable: whether statements may insert, update and delete rows.

    Attributes:
        trusted: True while the environment itself uses the connection. Everything is allowed then.
        refused: reason why the statement was refused, or "".
        stopped: reason why the statement was interrupted, or "".
    """

    def __init__(self, *, writable: bool) -> None:
        self._allowed = _READING | _CHANGING if writable else _READING
        self._seconds = self._until = math.inf
        self._left = 0
        self.trusted = True
        self.refused = self.stopped = ""

    def begin(self, *, instructions: int, seconds: float) -> None:
        """Apply the rules and these limits to a statement of the policy.

        Args:
            instructions: maximum number of instructions of SQLite's virtual machine.
            seconds: longest wall time.
        """
        self.trusted = False
        self.refused = self.stopped = ""
        self._left, self._seconds = instructions, seconds
        self._until = time.monotonic() + seconds

    def authorise(
        self, action: int, first: str | None, second: str | None, *where: str | None
    ) -> int:
        """SQLite's authoriser.

        Args:
            first: depends on the action, such as the name of a table.
            second: depends on the action, such as the name of a function.
            where: database and trigger.
        """
        if self.trusted or (action == sqlite3.SQLITE_PRAGMA and first == "data_version"):
            return sqlite3.SQLITE_OK  # full-text tables ask for the version to read
        if action in _CHANGING and str(first).lower().startswith("sqlite_"):
            self.refused = f"{_SCHEMA} not allowed; the schema is in sqlite_schema"
        elif action not in self._allowed:
            only = ": this database is read-only" if action in _CHANGING else ""
            self.refused = f"{_ACTIONS.get(action, _SCHEMA)} not allowed{only}"
        elif action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _REFUSED_FUNCTIONS:
            self.refused = f"the function {second} is not allowed"
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def progress(self) -> bool:
        """SQLite's progress handler, called every CHECKED_EVERY instructions.

        Returns:
            True to end the statement.
        """
        if self.trusted:
            return False
        self._left -= CHECKED_EVERY
        if self._left <= 0:
            self.stopped = "the statement takes too many steps"
        elif time.monotonic() > self._until:
            self.stopped = f"the statement takes longer than {self._seconds:g} s"
        return bool(self.stopped)
