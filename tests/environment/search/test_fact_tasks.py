"""Questions about made-up facts: the worked searches find the answers."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sixfold.errors import UserError
from sixfold_environments.search.agent import RESULTS
from sixfold_environments.search.fact_tasks import MOST_TASKS, fact_tasks
from sixfold_environments.search.facts import made_up_index, made_up_world

TASKS = fact_tasks(MOST_TASKS, seed=0)


def test_worked_solutions_search_read_and_find_the_answer() -> None:
    index = made_up_index(0)
    hops: Counter[int] = Counter()
    for task in TASKS[:300]:
        assert isinstance(task.trace, tuple)
        *calls, answer = task.trace
        known = task.prompt_text
        for search, read in zip(calls[::2], calls[1::2], strict=True):
            query = json.loads(search[11:-12])["arguments"]["query"]
            number = json.loads(read[11:-12])["arguments"]["id"]
            assert query in known and number not in known
            assert number in [document.id for document in index.search(query, RESULTS)]
            known = index.read(number).text
        assert answer == task.answer and answer in known and answer not in task.prompt_text
        hops[len(calls) // 2] += 1
    assert set(hops) == {1, 2} and min(hops.values()) > 100


def test_each_person_and_town_is_asked_about_once() -> None:
    world = made_up_world(0)
    names = [thing.name for thing in (*world.people, *world.towns)]
    assert len(set(names)) == len(names) == len(TASKS)
    assert len({document.id for document in world.documents}) == len(names)
    assert len({task.prompt for task in TASKS}) == len({task.id for task in TASKS}) == len(TASKS)


def test_tasks_depend_on_the_seed_alone() -> None:
    assert fact_tasks(30, seed=0) == TASKS[:30]
    others = {task.prompt for task in fact_tasks(1000, seed=1)}
    assert len(others & {task.prompt for task in TASKS}) < 1000


def test_no_answer_is_frequent() -> None:
    answers = Counter(task.answer for task in TASKS)
    assert max(answers.values()) <= 0.02 * len(TASKS)


def test_more_tasks_than_exist_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.limit = 6001: .*6000.*Lower"):
        fact_tasks(MOST_TASKS + 1, seed=0)
