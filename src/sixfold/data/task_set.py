"""Training and held-out tasks of a run, with ids that are unique across both.

Sampling noise, rollout records and resume name a task by its id. Ids are unique within a file or
split, but a train file and a test file often both count from 0. `TaskSet` is the only place where
both lists meet, so it makes ids unique across them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from numbers import Integral
from typing import Any, Protocol, TypeVar

from ..errors import UserError
from ..seeds import ORDER_BYTES, seed_bytes
from ..types import Message, Task
from ..user_code import own_copy
from .rows import check_value

HELDOUT_PREFIX = "heldout/"
_UNPAIRED = re.compile("[\ud800-\udfff]")


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Identified)


@dataclass
class TaskSet:
    """Tasks to train on, and tasks that are never trained on.

    If any held-out id is also a training id, every held-out id gets the prefix "heldout/".
    Otherwise ids stay unchanged.

    Args:
        notes: messages for the user, one line each, such as dropped rows.
        weights: relative share of each step's prompts by `Task.source`. Empty: all tasks are drawn
            alike.
        hub_commits: commit of each hub dataset by its id.

    Raises:
        UserError: if an id repeats within one of the lists.
    """

    train: list[Task]
    heldout: list[Task]
    notes: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    hub_commits: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_unique(self.train, "training")
        _check_unique(self.heldout, "held-out")
        self.heldout = _apart(self.train, self.heldout)


def given_tasks(tasks: Iterable[Any], heldout: Iterable[Any]) -> TaskSet:
    """Task set from the arguments of `sixfold.train`.

    Args:
        tasks: training tasks. At least one.
        heldout: held-out tasks. May be empty.

    Raises:
        UserError: if `tasks` is empty, an item is not a Task, or an id repeats.
    """
    task_set = TaskSet(_check_tasks("tasks", tasks), _check_tasks("heldout", heldout))
    if not task_set.train:
        raise UserError(
            "tasks is empty: give at least one, or leave it out for the recipe's dataset"
        )
    prompts = {prompt_key(task) for task in task_set.train}
    shared = sum(prompt_key(task) in prompts for task in task_set.heldout)
    if shared:
        task_set.notes.append(
            f"{shared} of {len(task_set.heldout)} held-out prompts are also trained on: held-out"
            " figures will be too high"
        )
    return task_set


def drawn_tasks(tasks: Sequence[T], count: int, seed: int) -> list[T]:
    """Draw the tasks, or documents, whose hash of seed and id is smallest.

    Files are often sorted, so the first tasks of a list are not representative. The draw does not
    depend on the order of the list, and a larger count draws the same tasks and more.

    Args:
        count: number of tasks. 0: all, in their order.
    """
    if not count:
        return list(tasks)
    return nsmallest(count, tasks, key=lambda task: seed_bytes(f"{seed}:{task.id}", ORDER_BYTES))


def few_tasks_notes(tasks: TaskSet, per_step: int) -> list[str]:
    """A note for each source with fewer training tasks than its share of a step."""
    if not tasks.weights:
        count = len(tasks.train)
        return (
            [
                f"rollout.prompts_per_step = {per_step}, but there are only {count} training"
                " tasks: every step trains on all of them"
            ]
            if count < per_step
            else []
        )
    notes = []
    total = sum(tasks.weights.values())
    for name, weight in tasks.weights.items():
        count, share = sum(task.source == name for task in tasks.train), per_step * weight / total
        if count < share:
            notes.append(
                f"data.sources: {name!r} has {count} training tasks and a share of {share:.1f}"
                " prompts per step: steps have fewer prompts than rollout.prompts_per_step"
            )
    return notes


def prompt_key(task: Task) -> str:
    """A key that is equal for two tasks exactly if their prompts and worlds are equal."""
    return f"{task.prompt_key}{task.world}"


def apart_from_heldout(train: Sequence[Task], heldout: Sequence[Task]) -> list[Task]:
    """The training tasks in which no held-out prompt is answered.

    Prompts are compared by what the user says in them, so a conversation is found that answers a
    held-out prompt in any of its replies, or a text that is a held-out prompt of one message.
    """
    prompts = {prompt_key(task) for task in heldout}
    held = {(_said(task.prompt), task.world) for task in heldout}
    return [
        task
        for task in train
        if prompt_key(task) not in prompts
        and held.isdisjoint((said, task.world) for said in _answered(task.prompt))
    ]


def _said(prompt: str | Sequence[Message]) -> tuple[str, ...]:
    """Texts of the user."""
    if isinstance(prompt, str):
        return (prompt.strip(),)
    return tuple(str(m.get("content") or "").strip() for m in prompt if m["role"] == "user")


def _answered(prompt: str | Sequence[Message]) -> list[tuple[str, ...]]:
    """Texts of the user before each reply, and in the whole."""
    if isinstance(prompt, str):
        return [_said(prompt)]
    replies = [at for at, message in enumerate(prompt) if message["role"] == "assistant"]
    return [_said(prompt[:at]) for at in (*replies, len(prompt))]


def _check_tasks(argument: str, given: Iterable[Any]) -> list[Task]:
    tasks = []
    for number, task in enumerate(given):
        if not isinstance(task, Task):
            raise UserError(
                f"{argument}[{number}] is of type {type(task).__name__}: give sixfold.Task(id=...,"
                " prompt=..., answer=...) objects"
            )
        tasks.append(_given_task(f"{argument}[{number}]", task))
    return tasks


def _given_task(where: str, task: Task) -> Task:
    """Copy of the task with its id as text and its messages as a tuple.

    Raises:
        UserError: if the task cannot be trained on.
    """
    identity, prompt = task.id if isinstance(task.id, str) else "", task.prompt
    if isinstance(task.id, Integral) and not isinstance(task.id, bool):
        identity = str(task.id)
    if not identity.strip():
        raise UserError(
            f"{where} has the id {task.id!r}: give every task a unique text as id, e.g."
            f" id='{where}'"
        )
    if isinstance(prompt, list | tuple):
        for message in prompt:
            if not (
                isinstance(message, dict)
                and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)
            ):
                raise UserError(
                    f"{where}.prompt: a message is {{'role': 'user', 'content': text}}, got"
                    f" {str(message)[:60]}"
                )
        prompt = tuple(prompt)
        empty = not prompt or not all(
            message["content"].strip() or message.get("tool_calls") for message in prompt
        )
    elif isinstance(prompt, str):
        empty = not prompt.strip()
    else:
        raise UserError(
            f"{where}.prompt is of type {type(prompt).__name__}: give text, or a list of messages"
        )
    if empty:
        raise UserError(f"{where} has an empty prompt")
    for name, value in (("id", identity), ("prompt", prompt), ("tools", task.tools)):
        if _UNPAIRED.search(json.dumps(value, ensure_ascii=False, default=str)):
            raise UserError(f"{where}.{name} holds a lone surrogate: it is not valid Unicode")
    check_value(where, "answer", task.answer)
    for name, value in {"trace": task.trace, **task.columns}.items():
        check_value(where, name, value)
    # The caller may go on with the row, for example a generator that fills it again.
    return own_copy(replace(task, id=identity, prompt=prompt))


def _check_unique(tasks: Sequence[Task], which: str) -> None:
    first: dict[str, int] = {}
    for number, task in enumerate(tasks):
        if task.id in first:
            raise UserError(
                f"duplicate id {task.id!r}: {which} tasks {first[task.id]} and {number} both have"
                " it; give every task a unique id"
            )
        first[task.id] = number


def _apart(train: Sequence[Task], heldout: list[Task]) -> list[Task]:
    """The held-out tasks, renamed if any of their ids is also a training id."""
    taken = {task.id for task in train}
    if taken.isdisjoint(task.id for task in heldout):
        return heldout
    prefix = HELDOUT_PREFIX
    while not taken.isdisjoint(prefix + task.id for task in heldout):
        prefix += HELDOUT_PREFIX
    return [replace(task, id=prefix + task.id) for task in heldout]
