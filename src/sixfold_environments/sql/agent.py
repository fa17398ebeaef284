"""Episode of the SQL agent: the tool `sql` on the database of a bookshop."""

from __future__ import annotations

from sixfold.environment.episode import Action, End
from sixfold.environment.grade import right_or_wrong
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool
from sixfold.types import Task

from ..text.short_answers import short_answer
from .bookshop import Change, make_bookshop
from .tool import run_query


class SqlAgent(ToolEpisode):
    """Answer questions about a bookshop's database, or change its rows, with SQL.

    A reply without a call ends the episode. A question is solved if the last reply states the
    answer (`short_answer`). Its database is read-only. A change is solved if the final rows are
    exactly the expected ones.

    Args:
        task: task of `bookshop_tasks`. Its columns hold the seed of the shop and the change.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        record = task.columns["change"]
        self._change = None if record is None else Change.from_record(record)
        self._shop = make_bookshop(task.columns["shop"])
        self._database = self._shop.database(writable=self._change is not None)

    @tool
    async def sql(self, query: str) -> str:
        """Run one SQL statement on the SQLite database of a bookshop, and return the rows as JSON.

        The tables are authors (id, name, town) and books (id, title, author, price, stock), where
        author is the id of an author.

        Args:
            query: the statement.
        """
        # No thread is needed: the limits of the bookshop end a statement within milliseconds.
        return run_query(self._database, query)

    async def final(self, action: Action) -> End:
        """Grade the last reply of a question, or the final rows of a change."""
        if self._change is None:
            return End(short_answer(action.content, self.task))
        return End(right_or_wrong(self._change.holds(self._shop, self._database)))
