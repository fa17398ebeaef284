"""Rows of a sampled dataset: kept completions as JSON, which load again as tasks with solutions.

A row has the columns `id`, `prompt` (text or messages), `completion` (text, or the replies of an
episode), `answer`, `reward` and `provenance` (task, sample, model, seed, source). It also has the
tools and template arguments of its prompt, and the other columns of its task, so that rewards and
environments find them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..data.files import Row
from ..data.prompts import ARGUMENTS, TOOLS
from ..data.rows import check_value, rows_to_tasks
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..recipe.schema import DataConfig
from ..recipe.stages import dataset_settings
from ..renderer.task_prompt import without_prefill
from ..types import PromptForm, Task
from .keepers import Completion, Keeper

_OURS = ("id", "prompt", "completion", "answer", "reward", "provenance")
_COMPARED = ("prompt", "answer", "tools", "template_args")


def sampled_row(keeper: Keeper, *, model: str, seed: int) -> dict[str, Any]:
    """The row of a kept completion.

    Args:
        keeper: the completion. `check_tasks` has accepted its task.
        model: hash of the weights that sampled it.
        seed: seed of the sampling noise.
    """
    task = keeper.task
    origin = {"task": task.id, "sample": keeper.sample, "model": model, "seed": seed}
    completion = keeper.completion
    if isinstance(completion, str) and without_prefill(completion, task) != completion:
        # SFT takes a prefill at the start of a solution for the prompt's. This one repeats it.
        completion = task.prefill.lstrip() + completion
    return _row(
        task,
        f"{task.id}/sample-{keeper.sample}",
        completion,
        {"reward": keeper.reward, "provenance": {**origin, "source": task.source}},
    )


def mixed_rows(
    tasks: Sequence[Task], kept: int, weight: float, *, number: int, seed: int
) -> tuple[list[dict[str, Any]], str]:
    """Rows of an entry of [[sample.mix]], drawn at random.

    Args:
        tasks: tasks with traces, loaded with `dataset_settings`.
        kept: number of sampled rows.
        weight: rows to draw per sampled row.
        number: position of the entry. Part of the ids of its rows.
        seed: seed of the draw.

    Returns:
        The rows, and a note if there are fewer than asked for, otherwise "".
    """
    count = round(kept * weight)
    drawn = drawn_tasks(tasks, count, seed) if count else []
    rows = [_mixed_row(task, number) for task in drawn]
    if len(rows) == count:
        return rows, ""
    return rows, (
        f"sample.mix: {drawn[0].source} has {len(rows)} rows, fewer than {weight:g} times the"
        f" {kept} kept ones: all of them are in the dataset"
    )


def check_tasks(tasks: Sequence[Task]) -> tuple[PromptForm, list[str]]:
    """Check, before anything is sampled, that rows of these tasks will load as the same tasks.

    Args:
        tasks: the tasks to sample. At least one.

    Returns:
        The form of all prompts, and notes about columns that a dataset cannot keep.

    Raises:
        UserError: tasks have prompts of two forms, or one has parts that a row cannot hold.
    """
    form = tasks[0].form
    settings = DataConfig(**dataset_settings("the dataset", form))
    for task in tasks:
        where = f"task {task.id}"
        if task.form != form:
            raise UserError(
                f"{where}: its prompt has the form '{task.form}', those before it '{form}'. One"
                " dataset has one form: sample them in two stages"
            )
        if task.world:
            raise UserError(
                f"{where} starts from a world ({task.world[:40]}) that a row does not hold: sample"
                " tasks of a file or of a dataset"
            )
        _check_loads(where, task, settings)
    return form, _column_notes(tasks)


def _row(
    task: Task, identity: str, completion: Completion | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """A row. Columns of the task with the name of one of ours are replaced."""
    shown = {TOOLS: task.tools, ARGUMENTS: task.template_args}
    own = {
        "id": identity,
        "prompt": task.prompt,
        "completion": completion,
        "answer": task.answer,
        **more,
        **{name: value for name, value in shown.items() if value},
    }
    others = {n: v for n, v in task.columns.items() if n not in own and _storable(n, v)}
    return {name: _plain(value) for name, value in {**own, **others}.items()}


def _mixed_row(task: Task, number: int) -> dict[str, Any]:
    origin = {"task": task.id, "mix": number, "source": task.source}
    more = {name: task.columns[name] for name in ("reward", "provenance") if name in task.columns}
    return _row(task, f"{task.id}/mix-{number}", task.trace, {"provenance": origin, **more})


def _check_loads(where: str, task: Task, settings: DataConfig) -> None:
    """Compare a task with the one that its row becomes.

    Raises:
        UserError: they differ, or the row does not load.
    """
    for name in _COMPARED:
        if not _storable(name, getattr(task, name)):
            raise UserError(
                f"{where}: its {name} holds a value that JSON has no form for. Use valid text,"
                " finite numbers, lists, and objects with texts as keys"
            )
    row = sampled_row(Keeper(task, 0, "-", 0.0), model="", seed=0)
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    ((loaded,), _) = rows_to_tasks([Row(where, json.loads(text), 0)], settings, name="", rewards=())
    for name in _COMPARED:
        if _plain(getattr(loaded, name)) != _plain(getattr(task, name)):
            raise UserError(
                f"{where}: its {name} would not load from a dataset as it is. Write it as a data"
                " file has it (docs/data.md)"
            )


def _column_notes(tasks: Iterable[Task]) -> list[str]:
    """A note about each column that rows do not keep as it is."""
    left, replaced = Counter[str](), Counter[str]()
    for task in tasks:
        for name, value in task.columns.items():
            if name not in _OURS:
                left[name] += not _storable(name, value)
            elif "provenance" not in task.columns:  # otherwise it is from an earlier stage
                replaced[name] += not _same(task, name, value)
    whys = ((left, "has no form in JSON and is left out"), (replaced, "is replaced by another"))
    return [
        f"dataset: the column '{name}' of {count:,} tasks {why}"
        for counted, why in whys
        for name, count in counted.items()
        if count
    ]


def _same(task: Task, name: str, value: Any) -> bool:
    """True if the column of this name in a row says what the task's column says."""
    if name == "id":
        return task.id.endswith(str(value))  # the id of one of several sources has a prefix
    return name in ("prompt", "answer") and bool(_plain(getattr(task, name)) == _plain(value))


def _storable(name: str, value: Any) -> bool:
    """True if JSON has a form for a value of a column, and our reader takes it."""
    try:
        check_value("", name, (name, value))
    except UserError:
        return False
    return _is_json(value)


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int)


def _plain(value: Any) -> Any:
    """A value with the lists and objects that JSON would give back."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
