"""Load tasks from one source or several.

Sources are the generators of `GENERATORS`, a file, a dataset folder and the hub. `datasets` is
imported only for folders and the hub.

Invariants: the same configuration and seed give the same tasks in the same order. No prompt is both
a training and a held-out prompt. Notes report everything that was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from pathlib import Path

from ..environment.arithmetic import arithmetic_tasks
from ..environment.calculator import calculator_tasks
from ..environment.code.short_functions import function_tasks
from ..environment.episodes import library_of
from ..environment.gym import gym_tasks
from ..environment.search.fact_tasks import MOST_TASKS, fact_tasks
from ..environment.sql.bookshop_tasks import bookshop_tasks
from ..environment.web.tasks import shop_tasks
from ..errors import UserError
from ..interop.environments.gymnasium_env import gymnasium_tasks
from ..interop.environments.openenv_env import openenv_tasks
from ..interop.environments.verifiers_env import verifiers_tasks
from ..recipe.schema import DataConfig, SourceConfig
from ..types import Task
from .files import FILE_TYPES, Row, drawn, is_file_name, read_file
from .hub import read_dataset
from .rows import rows_to_tasks, worded
from .task_set import TaskSet, drawn_tasks, prompt_key

GENERATED_TASKS = 20_000
"""Tasks that a generator makes if data.limit is not set. Fewer if fewer exist."""

SHOPS = 8_000
"""Tasks of the shop if data.limit is not set."""


@dataclass
class _Found:
    """Tasks read from one source, or from all.

    Args:
        train: training tasks.
        heldout: tasks of splits that are named as held out.
        notes: messages for the user.
        commit: commit of a hub dataset.
    """

    train: list[Task] = field(default_factory=list)
    heldout: list[Task] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commit: str = ""


def load_tasks(data: DataConfig, *, seed: int, rewards: tuple[str, ...]) -> TaskSet:
    """The tasks of a recipe.

    Args:
        data: the recipe's [data] section.
        seed: draws the held-out tasks and, with a limit, the rows.
        rewards: names of the rewards that will check the tasks, which decide the required fields.

    Raises:
        UserError: if a source is missing, empty or malformed. Names file and line where possible.
    """
    others = [name for name in data.names if name != "reasoning_gym"]
    gym_rewards = [name for name in ("reasoning_gym", "reasoning_gym_solved") if name in rewards]
    if gym_rewards and others:
        raise UserError(
            f"reward {gym_rewards[0]!r} scores tasks of data.source = 'reasoning_gym' only, not of"
            f" {others[0]!r}"
        )
    if data.sources:
        return _mixture(data, seed, rewards)
    found = _read(data, seed, rewards)
    made = _halves(found, data, seed)
    made.hub_commits = {data.source: found.commit} if found.commit else {}
    return made


def _mixture(data: DataConfig, seed: int, rewards: tuple[str, ...]) -> TaskSet:
    """Tasks of several sources.

    Ids get the source's name as prefix, and each task names its source.
    """
    everything, commits = _Found(), {}
    for source in data.sources:
        found = _read(_resolved(source, data), seed, rewards)
        for tasks, into in ((found.train, everything.train), (found.heldout, everything.heldout)):
            into += [
                replace(task, id=f"{source.label}/{task.id}", source=source.label) for task in tasks
            ]
        everything.notes += [f"{source.label}: {note}" for note in found.notes]
        if found.commit:
            commits[source.label] = found.commit
    made = _halves(everything, data, seed)
    made.hub_commits = commits
    made.weights = {source.label: source.weight for source in data.sources}
    left = {task.source for task in made.train}
    for source in data.sources:
        if source.label not in left:
            raise UserError(
                f"data.sources: no task of {source.label!r} is left to train on: all of its prompts"
                " are held out"
            )
    return made


def _resolved(source: SourceConfig, data: DataConfig) -> DataConfig:
    """The [data] section as if it had only this source."""
    own = {
        name: value
        for name, value in source
        if value is not None and name in DataConfig.model_fields
    }
    return data.model_copy(update={**own, "sources": ()})


def _halves(found: _Found, data: DataConfig, seed: int) -> TaskSet:
    made = (
        _disjoint(found.train, found.heldout)
        if found.heldout
        else _set_aside(found.train, data.heldout, seed)
    )
    made.notes = [*found.notes, *made.notes]
    return made


def _read(data: DataConfig, seed: int, rewards: tuple[str, ...]) -> _Found:
    """The tasks of one source."""
    if data.source in GENERATORS:
        made = GENERATORS[data.source](data, seed)
        return _Found([replace(task, prompt=worded(task.prompt_text, data)) for task in made])
    if kind := library_of(data.source):
        return _foreign(kind, data.source.partition(":")[2], data, seed)
    splits, commit = _read_splits(data, seed)
    found = _Found(commit=commit)
    for split, rows in splits.items():
        if not rows:
            raise UserError(f"dataset {data.source!r} has 0 rows in split {split!r}")
        tasks, notes = rows_to_tasks(rows, data, name=split, rewards=rewards)
        into = found.heldout if found.train else found.train
        into += tasks
        found.notes += notes
    return found


def _worded(task: Task, data: DataConfig) -> Task:
    """The task with the texts of [data] around its prompt, if that is text."""
    prompt = task.prompt
    return replace(task, prompt=worded(prompt, data)) if isinstance(prompt, str) else task


def _foreign(kind: str, name: str, data: DataConfig, seed: int) -> _Found:
    """The tasks of another library's environment."""
    if kind not in FOREIGN:
        raise UserError(
            f"data.source = {data.source!r}: environments of kind {kind!r} have no tasks. Use a"
            f" file, or one of {', '.join(FOREIGN)}"
        )
    train, heldout = FOREIGN[kind](name, data, seed)
    if data.system_prompt or data.prompt_suffix:
        for task in (*train, *heldout):
            if not isinstance(task.prompt, str):
                raise UserError(
                    f"{data.source} writes whole conversations: leave data.system_prompt and"
                    " data.prompt_suffix empty"
                )
    return _Found(
        [_worded(task, data) for task in train], [_worded(task, data) for task in heldout]
    )


FOREIGN: Mapping[str, Callable[[str, DataConfig, int], tuple[list[Task], list[Task]]]] = {
    "gymnasium": lambda name, data, seed: (gymnasium_tasks(name, data.limit, seed), []),
    "openenv": lambda name, data, seed: (openenv_tasks(name, data.limit, seed), []),
    "verifiers": lambda name, data, seed: verifiers_tasks(name, data.limit, data.heldout),
}
"""Kind of another library's environment -> its tasks for training and for evaluation."""


def _sums(data: DataConfig, seed: int) -> list[Task]:
    terms, digits = data.arithmetic.terms, data.arithmetic.digits
    count = data.limit or min(GENERATED_TASKS, comb(10**digits + terms - 1, terms))
    return arithmetic_tasks(count, terms=terms, digits=digits, seed=seed)


def _calls(data: DataConfig, seed: int) -> list[Task]:
    made, count = data.calculator, data.limit or GENERATED_TASKS
    return calculator_tasks(count, numbers=made.numbers, digits=made.digits, seed=seed)


def _gym(data: DataConfig, seed: int) -> list[Task]:
    gym = data.reasoning_gym
    return drawn(gym_tasks(gym.tasks, gym.size, seed, gym.options), data.limit, seed)


def _functions(data: DataConfig, seed: int) -> list[Task]:
    return function_tasks(data.limit or GENERATED_TASKS, seed=seed)


def _bookshops(data: DataConfig, seed: int) -> list[Task]:
    return bookshop_tasks(data.limit or GENERATED_TASKS, seed=seed)


def _facts(data: DataConfig, seed: int) -> list[Task]:
    return fact_tasks(data.limit or MOST_TASKS, seed=seed)


def _shops(data: DataConfig, seed: int) -> list[Task]:
    return shop_tasks(data.limit or SHOPS, seed=seed)


GENERATORS = {
    "arithmetic": _sums,
    "calculator": _calls,
    "code_functions": _functions,
    "reasoning_gym": _gym,
    "search_agent": _facts,
    "sql_agent": _bookshops,
    "web_shop": _shops,
}
"""Source -> function that makes its tasks, whose prompts are text."""


def _set_aside(tasks: list[Task], count: int, seed: int) -> TaskSet:
    """Hold out the `count` tasks whose hash of seed and id is smallest.

    The order of the list does not matter.
    """
    if count >= len(tasks):
        raise UserError(
            f"data.heldout = {count} of {len(tasks)} tasks leaves none to train on: lower it"
        )
    heldout = drawn_tasks(tasks, count, seed) if count else []
    chosen = {task.id for task in heldout}
    return _disjoint([task for task in tasks if task.id not in chosen], heldout)


def _disjoint(train: list[Task], heldout: list[Task]) -> TaskSet:
    """Drop training tasks whose prompt is also held out. A note says how many."""
    prompts = {prompt_key(task) for task in heldout}
    kept = [task for task in train if prompt_key(task) not in prompts]
    dropped = len(train) - len(kept)
    if not kept:
        raise UserError(
            f"dataset has 0 usable rows ({len(train)} read, {dropped} dropped: their prompts are"
            " held out)"
        )
    notes = (
        [f"{dropped} training rows dropped: their prompts also occur in the held-out tasks"]
        if dropped
        else []
    )
    return TaskSet(kept, heldout, notes)


def _read_splits(data: DataConfig, seed: int) -> tuple[Mapping[str, Sequence[Row]], str]:
    """Rows by split, and the commit of a hub dataset.

    The splits are the training split and the held-out split if one is named. For a file, the
    held-out split is another file.
    """
    splits = [split for split in (data.split, data.heldout_split) if split]
    if len(set(splits)) < len(splits):
        raise UserError(
            f"data.split and data.heldout_split are both {data.split!r}: nothing would be left to"
            " train on"
        )
    if not is_file_name(data.source) and not Path(data.source).is_file():
        return read_dataset(data, splits, seed)
    if unused := data.subset or data.revision:
        raise UserError(
            f"{data.source} is a file: data.subset and data.revision are for hub datasets; leave"
            f" out {unused!r}"
        )
    found = {data.split: read_file(Path(data.source), data.limit, seed)}
    if data.heldout_split:
        if not is_file_name(data.heldout_split):
            raise UserError(
                f"{data.source} has no splits: data.heldout_split is another file"
                f" ({', '.join(FILE_TYPES)}), or empty, not {data.heldout_split!r}"
            )
        found[data.heldout_split] = read_file(Path(data.heldout_split), data.limit, seed)
    return found, ""
