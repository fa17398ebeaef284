"""Tasks about bookshops: the worked SQL finds the answers that Python computes."""

from __future__ import annotations

import json
import re
from collections import Counter

from sixfold.types import Task
from sixfold_environments.sql.bookshop import Change, make_bookshop
from sixfold_environments.sql.bookshop_tasks import JOBS, bookshop_tasks

TASKS = bookshop_tasks(20 * len(JOBS), seed=0)


def queries(task: Task) -> list[str]:
    """The statements of the worked solution."""
    assert isinstance(task.trace, tuple)
    calls = [
        json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        for reply in task.trace[:-1]
    ]
    assert all(call["name"] == "sql" and list(call["arguments"]) == ["query"] for call in calls)
    return [call["arguments"]["query"] for call in calls]


def test_worked_solutions_find_the_answers_and_make_the_changes() -> None:
    for task in TASKS:
        shop = make_bookshop(task.columns["shop"])
        database = shop.database(writable=task.answer is None)
        results = [database.run(query) for query in queries(task)]
        if task.answer is not None:
            assert results[-1].rows == ((task.answer,),), task.prompt
            assert task.trace is not None and task.trace[-1] == str(task.answer)
            continue
        change = Change.from_record(task.columns["change"])
        assert change.holds(shop, database), task.prompt
        assert not change.holds(shop, shop.database(writable=True)), task.prompt


def test_a_second_statement_needs_a_value_of_the_first() -> None:
    two = [task for task in TASKS if len(queries(task)) == 2]
    assert len(two) >= len(TASKS) / 3
    known = 0
    for task in two:
        first, second = queries(task)
        shop = make_bookshop(task.columns["shop"])
        ((value,),) = shop.database(writable=False).run(first).rows
        assert str(value) in second
        known += str(value) in re.findall(r"\w+", task.prompt_text)
    assert known <= 0.05 * len(two)  # a price may equal an id by chance


def test_tasks_differ_and_depend_on_the_seed_alone() -> None:
    assert bookshop_tasks(30, seed=0) == TASKS[:30]
    assert len({task.id for task in TASKS}) == len({task.prompt for task in TASKS}) == len(TASKS)
    others = bookshop_tasks(len(TASKS), seed=1)
    assert len({task.prompt for task in TASKS} & {task.prompt for task in others}) < 50


def test_no_answer_is_frequent() -> None:
    answers = Counter(task.answer for task in TASKS if task.answer is not None)
    assert max(answers.values()) <= 0.05 * answers.total()
