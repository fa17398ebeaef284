"""Episode of the search agent: the tools `search` and `read` on a corpus of made-up facts."""

from __future__ import annotations

from sixfold.environment.episode import Action, End
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.types import Task

from ..text.short_answers import short_answer
from .facts import made_up_index
from .tools import search_tools

RESULTS = 1
"""Default number of results. All names differ, so the best match is the right document."""


class SearchAgent(ToolEpisode):
    """Answer a question about made-up facts by searching documents.

    A reply without a call ends the episode. The reward is 1 if the last reply states the answer
    (`short_answer`).

    Args:
        task: task of `fact_tasks`. Its columns hold the seed of the world.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task, search_tools(made_up_index(task.columns["world"]), RESULTS))

    async def final(self, action: Action) -> End:
        """Grade the last reply."""
        return End(short_answer(action.content, self.task))
