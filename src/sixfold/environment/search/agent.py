"""Episode of the search agent: the tools `search` and `read` on a corpus of made-up facts."""

from __future__ import annotations

from ...types import Task
from ..episode import Action, End
from ..text.short_answers import short_answer
from ..tools.episode import ToolEpisode
from .facts import made_up_index
from .tools import search_tools

RESULTS = 1
"""Default number of results. All names differ, so the best match is the right document."""


class SearchAgent(ToolEpisode):
    """Episode of a task of `fact_tasks`. A reply without a call ends it.

    The reward is 1 if the last reply states the answer (`short_answer`).

    Args:
        task: task of `fact_tasks`. Its columns hold the seed of the world.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task, search_tools(made_up_index(task.columns["world"]), RESULTS))

    async def final(self, action: Action) -> End:
        """Grade the last reply."""
        return End(short_answer(action.content, self.task))
