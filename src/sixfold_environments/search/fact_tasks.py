"""Tasks of the search agent: questions about made-up people and towns, with one or two hops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sixfold.environment.tools.worked import worked_call
from sixfold.errors import UserError
from sixfold.types import Task

from .facts import PEOPLE, TOWNS, Person, Town, World, made_up_world

_Made = tuple[str, Sequence[Person | Town], str]
"""(question, documents that the worked solution reads, answer)"""


def _home(world: World, person: Person) -> _Made:
    return f"where does {person.name} live?", (person,), person.town


def _mayor_at_home(world: World, person: Person) -> _Made:
    town = world.town_of(person)
    return f"who is the mayor where {person.name} lives?", (person, town), town.mayor.name


def _mayor(world: World, town: Town) -> _Made:
    return f"who is the mayor of {town.name}?", (town,), town.mayor.name


def _mayors_home(world: World, town: Town) -> _Made:
    return f"where does the mayor of {town.name} live?", (town, town.mayor), town.mayor.town


MOST_TASKS = PEOPLE + TOWNS
"""Largest number of tasks: one question per person and one per town."""

ABOUT_PEOPLE: tuple[Callable[[World, Person], _Made], ...] = (_home, _mayor_at_home)
ABOUT_TOWNS: tuple[Callable[[World, Town], _Made], ...] = (_mayor, _mayors_home)


def fact_tasks(count: int, *, seed: int) -> list[Task]:
    """Make questions, each about a different person or town. The same arguments give the same list.

    Args:
        count: number of tasks.
        seed: random seed of the world and of the questions.

    Raises:
        UserError: if `count` is above `MOST_TASKS`.
    """
    if count > MOST_TASKS:
        raise UserError(f"data.limit = {count}: search_agent has {MOST_TASKS} tasks. Lower it")
    world = made_up_world(seed)
    made = [
        _task(seed, person.id, ABOUT_PEOPLE[i % len(ABOUT_PEOPLE)](world, person))
        for i, person in enumerate(world.people)
    ]
    made += [
        _task(seed, town.id, ABOUT_TOWNS[i % len(ABOUT_TOWNS)](world, town))
        for i, town in enumerate(world.towns)
    ]
    random.Random(f"fact_tasks/{seed}").shuffle(made)
    return made[:count]


def _task(seed: int, name: str, made: _Made) -> Task:
    question, documents, answer = made
    calls = [
        call
        for document in documents
        for call in (
            worked_call("search", {"query": document.name}),
            worked_call("read", {"id": document.id}),
        )
    ]
    return Task(
        id=f"search_agent-{seed}-{name}",
        prompt=question,
        answer=answer,
        trace=(*calls, answer),
        columns={"world": seed},
        source=f"search_agent_{'person' if ' ' in answer else 'town'}",
    )
