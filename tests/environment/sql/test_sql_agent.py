"""Episodes of the SQL agent: worked solutions earn 1, and nothing else does."""

from __future__ import annotations

import asyncio
import copy
import json
import sqlite3
from pathlib import Path

import pytest
from tests.environment.tool_replies import play, reward

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.types import ToolCall
from sixfold_environments.sql.agent import SqlAgent
from sixfold_environments.sql.bookshop_tasks import JOBS, bookshop_tasks
from sixfold_environments.sql.tool import sql_tools

TASKS = bookshop_tasks(4 * len(JOBS), seed=3)
QUESTION = next(task for task in TASKS if task.answer is not None)
CHANGE = next(task for task in TASKS if task.answer is None)


def test_worked_solutions_earn_1_and_their_last_reply_alone_does_not_change_anything() -> None:
    for task in TASKS:
        assert isinstance(task.trace, tuple)
        assert reward(SqlAgent, task, *task.trace) == 1
        assert reward(SqlAgent, task, "done") == 0


def test_a_wrong_answer_or_a_list_of_answers_earns_0() -> None:
    for task in TASKS:
        if task.answer is None:
            continue
        assert isinstance(task.trace, tuple)
        *calls, answer = task.trace
        others = [str(other.answer) for other in TASKS if other.answer not in (None, task.answer)]
        for wrong in ("", "-" + answer, answer + "0", others[0], ", ".join([answer, *others])):
            if wrong != "-" + answer or isinstance(task.answer, int):
                assert reward(SqlAgent, task, *calls, wrong) == 0


def test_a_change_that_does_more_earns_0() -> None:
    assert isinstance(CHANGE.trace, tuple)
    *calls, last = CHANGE.trace
    more = calls[0].replace(
        json.loads(calls[0][11:-12])["arguments"]["query"],
        "update books set stock = 0 where id = 1",
    )
    assert reward(SqlAgent, CHANGE, *calls, more, last) == 0


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("delete from books", "refused"),
        ("attach '/etc/passwd' as p", "refused"),
        ("select nope", "sql"),
        (
            "with recursive c(x) as (select 1 union all select x from c) select x + 1 from c"
            " order by 1",
            "too_long",
        ),
        ("select hex(zeroblob(1000000000))", "too_large"),
        ("", "sql"),
    ],
)
def test_a_bad_statement_is_a_structured_error_and_the_episode_goes_on(
    query: str, kind: str
) -> None:
    call = json.dumps({"name": "sql", "arguments": {"query": query}})
    assert isinstance(QUESTION.trace, tuple)
    answers = play(SqlAgent, QUESTION, f"<tool_call>{call}</tool_call>", *QUESTION.trace)
    seen, end = answers[1], answers[-1]
    assert isinstance(seen, Observation) and seen.tool_errors == 1
    error = json.loads(seen.messages[0]["content"])["error"]
    assert error["message"].startswith(f"{kind}: ")
    assert isinstance(end, End) and isinstance(end.reward, Grade) and end.reward.value == 1


def test_the_tool_reads_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "cups.sqlite"
    made = sqlite3.connect(path)
    made.executescript("CREATE TABLE cups (id INTEGER); INSERT INTO cups VALUES (7);")
    made.close()
    tool = sql_tools(path)[0]
    assert tool.description["function"]["parameters"]["required"] == ["query"]
    assert tool("select id from cups") == "[[7]]"
    with pytest.raises(Exception, match="refused: DELETE"):
        tool("delete from cups")
    with pytest.raises(UserError, match=r"environment\.sql\.database"):
        sql_tools(tmp_path / "absent.sqlite")


def test_a_branch_changes_its_own_rows() -> None:
    """A copied episode goes on from the rows of the other; a read-only database is not copied."""
    step, count = (
        Action("", calls=(ToolCall("sql", json.dumps({"query": query})),))
        for query in ("DELETE FROM books", "SELECT count(*) FROM books")
    )

    async def rows(episode: SqlAgent) -> str:
        answer = await episode.step(count)
        assert isinstance(answer, Observation)
        return str(answer.messages[0]["content"])

    async def branched() -> None:
        trunk = SqlAgent(CHANGE)
        await trunk.start()
        before = await rows(trunk)
        branch = copy.deepcopy(trunk)
        await trunk.step(step)
        assert (await rows(trunk), await rows(branch)) == ("[[0]]", before)
        assert await rows(copy.deepcopy(trunk)) == "[[0]]" != before
        asked = SqlAgent(QUESTION)
        assert await rows(copy.deepcopy(asked)) == await rows(asked)

    asyncio.run(branched())
