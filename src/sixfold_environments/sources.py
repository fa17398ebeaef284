"""Sources of tasks that this package registers: generators, and environments of libraries.

A generator takes the data settings and the seed of a run. A library's source takes the name of the
environment before them, and returns training tasks, held-out tasks and notes.
"""

from __future__ import annotations

from dataclasses import replace

from sixfold.data.files import draw
from sixfold.data.generated import GENERATED_TASKS
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task

from .adapters.gymnasium_env import gymnasium_tasks
from .adapters.openenv_env import openenv_notes, openenv_tasks
from .adapters.verifiers_env import verifiers_tasks
from .code.short_functions import function_tasks, number_of_functions
from .gym import gym_tasks
from .maths.word_problems import word_problem_tasks
from .search.fact_tasks import MOST_TASKS, fact_tasks
from .sql.bookshop_tasks import bookshop_tasks
from .web.tasks import shop_tasks

Found = tuple[list[Task], list[Task], list[str]]

SHOPS = 8_000
"""Tasks of the shop if data.limit is not set."""


def code_functions(data: DataConfig, seed: int) -> list[Task]:
    parts = data.code_functions.parts
    count = data.limit or min(GENERATED_TASKS, number_of_functions(parts))
    return function_tasks(count, parts=parts, seed=seed)


def word_problems(data: DataConfig, seed: int) -> list[Task]:
    """Word problems of one number of changes, or of a range, in equal parts."""
    made, whole = data.word_problems, data.limit or GENERATED_TASKS
    steps = range(made.min_steps or made.steps, made.steps + 1)
    tasks: list[Task] = []
    for left, number in zip(range(len(steps), 0, -1), steps, strict=True):
        few = word_problem_tasks(
            (whole - len(tasks)) // left,
            steps=number,
            digits=made.digits,
            asides=made.asides,
            seed=seed,
            exact=bool(data.limit) and left == 1,
        )
        tasks += [replace(t, source=f"{number} steps") for t in few] if made.min_steps else few
    return tasks


def reasoning_gym(data: DataConfig, seed: int) -> list[Task]:
    gym = data.reasoning_gym
    return draw(gym_tasks(gym.tasks, gym.size, seed, gym.options), data.limit, seed)


def search_agent(data: DataConfig, seed: int) -> list[Task]:
    """Questions about made-up people and towns."""
    return fact_tasks(data.limit or MOST_TASKS, seed=seed)


def sql_agent(data: DataConfig, seed: int) -> list[Task]:
    return bookshop_tasks(data.limit or GENERATED_TASKS, seed=seed)


def web_shop(data: DataConfig, seed: int) -> list[Task]:
    """Orders in a shop."""
    return shop_tasks(data.limit or SHOPS, seed=seed)


def gymnasium(name: str, data: DataConfig, seed: int) -> Found:
    return gymnasium_tasks(name, data.limit, seed), [], []


def openenv(name: str, data: DataConfig, seed: int) -> Found:
    return openenv_tasks(name, data.limit, seed), [], openenv_notes(name, seed)


def verifiers(name: str, data: DataConfig, seed: int) -> Found:
    return *verifiers_tasks(name, data.limit, data.heldout), []
