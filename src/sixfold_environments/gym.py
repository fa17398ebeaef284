"""Tasks of reasoning-gym, with that library's generators and scorers. Needs the extra `gym`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from sixfold.environment.answer_part import answer_part
from sixfold.environment.grade import Grade, right_or_wrong
from sixfold.errors import UserError, nearest
from sixfold.types import Task

from .gym_traces import gym_trace

ALL = "all"
MIXTURE = "composite"
"""The dataset that mixes others. Several names in `data.reasoning_gym.tasks` do the same."""


def gym_tasks(
    names: Sequence[str], size: int, seed: int, options: Sequence[str] = ()
) -> list[Task]:
    """Make `size` tasks of each named dataset. Those that `gym_traces` knows have worked solutions.

    Args:
        names: datasets of the library, or "all" for every one.
        size: tasks per dataset, unless `options` give a `size`.
        seed: seed of the generators, unless `options` give a `seed`.
        options: settings of the generators, as `DATASET.NAME=VALUE`.

    Raises:
        UserError: for an unknown dataset or option, for a bad value, or if the library is not
            installed.
    """
    factory = load_gym().factory
    names = gym_names(names, list(factory.DATASETS))
    settings = gym_options(options, names)
    tasks = []
    for name in names:
        if name == MIXTURE:
            raise UserError(
                f"data.reasoning_gym.tasks: {MIXTURE!r} mixes other datasets. Name those instead"
            )
        if name not in factory.DATASETS:
            raise UserError(
                f"reasoning-gym has no dataset {name!r}.{nearest(name, list(factory.DATASETS))}"
            )
        arguments = {"size": size, "seed": seed} | settings[name]
        try:
            dataset = factory.create_dataset(name, **arguments)
            count = len(dataset)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"reasoning-gym dataset {name!r}: {error}") from error
        tasks += [
            _task(name, arguments["seed"], number, dataset[number]) for number in range(count)
        ]
    return tasks


def gym_names(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names of datasets, with "all" replaced by every dataset that does not mix others."""
    found = [
        each
        for name in names
        for each in ((n for n in known if n != MIXTURE) if name == ALL else (name,))
    ]
    return list(dict.fromkeys(found))


def gym_options(options: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by dataset: `chain_sum.max_terms=4` becomes {"chain_sum": {"max_terms": 4}}.

    A value is parsed as JSON if possible, otherwise it is text.

    Raises:
        UserError: for an option of another form, or for a dataset that is not in `names`.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option in options:
        key, _, text = option.partition("=")
        dataset, dot, name = key.partition(".")
        if not (dot and name and text):
            raise UserError(
                f"data.reasoning_gym.options: {option!r} must have the form DATASET.NAME=VALUE,"
                " e.g. chain_sum.max_terms=4"
            )
        if dataset not in found:
            raise UserError(
                f"data.reasoning_gym.options: {option!r} is for {dataset!r}, which is not in"
                " data.reasoning_gym.tasks. Add it there, or remove the option"
            )
        try:
            found[dataset][name] = json.loads(text)
        except json.JSONDecodeError:
            found[dataset][name] = text
    return found


def gym_reward(completion: str, task: Task) -> float:
    """The library's score of the answer, 0 to 1.

    The answer is the content of the last `<answer>` tag, otherwise the text after the last `#`,
    otherwise the whole text. An answer that contains `#` (such as the grid of some games) needs the
    tag.

    Some of the library's scorers raise on an answer that they cannot read. The answer is wrong if
    they can read the reference answer.
    """
    entry = {
        "question": task.prompt_text,
        "answer": task.answer,
        "metadata": task.columns["metadata"],
    }
    scorer = _scorer(task.columns["dataset"])
    try:
        return float(scorer(submitted_answer(completion), entry))
    except Exception:
        if not isinstance(task.answer, str) or float(scorer(task.answer, entry)) < 1:
            raise
        return 0.0


def gym_solved(completion: str, task: Task) -> float:
    """1 if the library gives the answer full marks, otherwise 0: there is no partial credit."""
    return float(gym_reward(completion, task) >= 1)


def gym_grade(completion: str, task: Task) -> Grade:
    """`gym_reward` with a verdict. Partial credit is a wrong answer."""
    value = gym_reward(completion, task)
    return Grade(value, "passed" if value >= 1 else "wrong_answer")


def gym_solved_grade(completion: str, task: Task) -> Grade:
    """`gym_solved` with a verdict."""
    return right_or_wrong(gym_solved(completion, task) == 1.0)


def submitted_answer(completion: str) -> str:
    """The part of a completion that is scored, without thoughts."""
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
        trace=gym_trace(name, entry),
        columns={"dataset": name, "metadata": entry["metadata"]},
        source=name,
    )


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    score: Callable[[str, Mapping[str, Any]], float] = load_gym().factory.get_score_answer_fn(name)
    return score


def load_gym() -> ModuleType:
    """The library, imported on the first call.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError("reasoning-gym is not installed. Run pip install 'sixfold[gym]'") from error
    return reasoning_gym
