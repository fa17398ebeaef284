"""Tasks of reasoning-gym: that library's own generators and its own scorers, as they are. Needs the extra `gym`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from sixfold.environment.answer_part import answer_part
from sixfold.errors import UserError, nearest
from sixfold.types import Task


def gym_tasks(names: Sequence[str], size: int, seed: int, settings: Mapping[str, Mapping[str, Any]] | None = None) -> list[Task]:
    """`size` tasks of each named dataset. settings: by name, configuration of that dataset as the library takes it.

    Raises UserError for an unknown name, for a bad setting, or without the library.
    """
    factory = _library().factory
    tasks = []
    for name in names:
        if name not in factory.DATASETS:
            raise UserError(f"reasoning-gym has no dataset {name!r}.{nearest(name, list(factory.DATASETS))}")
        try:
            dataset = factory.create_dataset(name, size=size, seed=seed, **(settings or {}).get(name, {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"reasoning-gym dataset {name!r}: {error}") from error
        tasks += [_task(name, seed, number, dataset[number]) for number in range(size)]
    return tasks


def gym_reward(completion: str, task: Task) -> float:
    """The library's score of the answer, 0 to 1. The answer is what stands in the last `<answer>` tag, else what follows the last `#`, else all.

    An answer that holds a `#` itself (a grid of some games) needs the tag.
    """
    entry = {"question": task.prompt_text, "answer": task.answer, "metadata": task.columns["metadata"]}
    return float(_scorer(task.columns["dataset"])(submitted_answer(completion), entry))


def submitted_answer(completion: str) -> str:
    """The part of a completion that is scored. Thoughts are not."""
    completion = answer_part(completion)
    tagged = completion.rpartition("<answer>")
    if tagged[1]:
        return tagged[2].partition("</answer>")[0].strip()
    return completion.rpartition("#")[2].strip()


def _task(name: str, seed: int, number: int, entry: Mapping[str, Any]) -> Task:
    return Task(
        id=f"{name}-{seed}-{number}",
        prompt=entry["question"],
        answer=entry["answer"],
        columns={"dataset": name, "metadata": entry["metadata"]},
        source="reasoning_gym",
    )


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    score: Callable[[str, Mapping[str, Any]], float] = _library().factory.get_score_answer_fn(name)
    return score


def _library() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError('reasoning-gym is not installed: pip install "sixfold[gym]"') from error
    return reasoning_gym
