"""The tool `sql`: read-only queries on a SQLite file of the user."""

from __future__ import annotations

from pathlib import Path

from sixfold.environment.tools.observation import ToolError, ToolsFailed
from sixfold.environment.tools.tool import Tool, tool
from sixfold.errors import UserError

from .database import Database, QueryError


def sql_tools(path: Path) -> tuple[Tool]:
    """Make the tool `sql` for a file. Each call opens the file, so calls can run concurrently.

    Raises:
        UserError: if the file cannot be read, or is not a SQLite database.
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
        except UserError as error:  # the file was readable when the run began
            raise ToolsFailed(str(error)) from error
        try:
            return run_query(database, query)
        finally:
            database.close()

    return (sql,)


def run_query(database: Database, query: str) -> str:
    """Run a statement and return its result as text for the policy.

    Raises:
        ToolError: if the statement is refused, fails or exceeds a limit.
    """
    try:
        return database.run(query).text
    except QueryError as error:
        raise ToolError(f"{error.kind}: {error}") from error
