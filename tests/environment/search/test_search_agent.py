"""Episodes of the search agent, and its tools."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from tests.environment.tool_replies import play, reward

from sixfold.environment.episode import Observation
from sixfold.environment.tools.observation import ToolError
from sixfold.environment.tools.tool import Tool
from sixfold_environments.search import tools
from sixfold_environments.search.agent import SearchAgent
from sixfold_environments.search.fact_tasks import fact_tasks
from sixfold_environments.search.index import Document, SearchIndex
from sixfold_environments.search.tools import search_tools

TASKS = fact_tasks(60, seed=0)


def test_worked_solutions_earn_1_and_other_answers_0() -> None:
    every = ", ".join(task.answer for task in TASKS)
    for task, other in pairwise(TASKS):
        assert isinstance(task.trace, tuple)
        assert reward(SearchAgent, task, *task.trace) == 1
        for wrong in (every, "", task.prompt_text):
            assert reward(SearchAgent, task, wrong) == 0
        if other.answer != task.answer:
            assert reward(SearchAgent, task, *task.trace[:-1], other.answer) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search", {"query": '"*()'}, "no words"),
        ("search", {"query": "tea", "k": 0}, "1 to 20"),
        ("read", {"id": "nothing"}, "no document"),
        ("read", {"id": "", "start": -1}, "no document"),
    ],
)
def test_a_call_that_cannot_be_answered_is_a_structured_error(
    name: str, arguments: dict[str, object], message: str
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    seen = play(SearchAgent, TASKS[0], f"<tool_call>{call}</tool_call>")[-1]
    assert isinstance(seen, Observation) and seen.tool_errors == 1
    assert message in json.loads(seen.messages[0]["content"])["error"]["message"]


def ran(tool: Tool, *arguments: object) -> object:
    return asyncio.run(tool(*arguments))


def test_a_long_document_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "READ_CHARACTERS", 10)
    _, read = search_tools(SearchIndex([Document("a", "letters", "abcdefghijklmnopqrstuvwxyz")]))
    assert ran(read, "a") == "abcdefghij\n(16 more characters from start = 10)"
    assert ran(read, "a", 20) == "uvwxyz"
    assert read.values('{"id": 7, "start": 1}') == {"id": 7, "start": 1}
    assert ran(search_tools(SearchIndex([Document("7", "seven", "a number")]))[1], 7) == "a number"
    for start in (-1, 26, 10**30):
        with pytest.raises(ToolError, match="0 to 25"):
            ran(read, "a", start)


@pytest.mark.parametrize("quick", [0, 10])
def test_a_large_corpus_gives_the_same_results(quick: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "QUICK_DOCUMENTS", quick)
    search, _ = search_tools(SearchIndex([Document(name, name, "letters") for name in "abc"]), 2)
    assert ran(search, "letters") == [{"id": "a", "title": "a"}, {"id": "b", "title": "b"}]
    with pytest.raises(ToolError, match="no words"):
        ran(search, "*")
