"""The tool `sql`: queries on a SQLite file of the user, which stays as it is."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..tools.observation import ToolError, ToolsFailed
from ..tools.tool import Tool, tool
from .database import Database, QueryError


def sql_tools(path: Path) -> tuple[Tool]:
    """The tool `sql` of a user's file. Each call opens it anew, so calls can run at the same time.

    Raises:
        UserError: if it cannot be read, or is not a SQLite database.
    """
    Database.file(path).close()

    @tool
    def sql(query: str) -> str:
        """Run one SQL query on a SQLite database, and return the rows as JSON.

        The table sqlite_schema lists the tables and their columns. The database is read-only.

        Args:
            query: the query.
        """
        try:
            database = Database.file(path)
        except UserError as error:  # it was readable when the run began
            raise ToolsFailed(str(error)) from error
        try:
            return answered(database, query)
        finally:
            database.close()

    return (sql,)


def answered(database: Database, query: str) -> str:
    """Result of a statement as the policy reads it.

    Raises:
        ToolError: the statement is refused, fails or exceeds a limit.
    """
    try:
        return database.run(query).text
    except QueryError as error:
        raise ToolError(f"{error.kind}: {error}") from error
