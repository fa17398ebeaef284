"""Load tasks from one source or several.

Sources are registered generators and libraries (`environment.registry`), files, dataset folders and
the hub. `datasets` is imported only for folders and the hub.

Invariants: the same configuration and seed give the same tasks in the same order. No prompt is both
a training and a held-out prompt. Notes report everything that was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..environment.episodes import library_of
from ..environment.named import load_object
from ..environment.registry import LIBRARIES, REWARDS, SOURCES
from ..errors import UserError
from ..recipe.schema import DataConfig, SourceConfig
from ..types import Task
from .files import FILE_TYPES, Row, is_file_name, read_file
from .hub import read_dataset
from .prompts import task_form, worded
from .rows import rows_to_tasks
from .task_set import TaskSet, drawn_tasks, prompt_key

Conversion = Callable[[Sequence[Row], DataConfig, str], tuple[list[Task], list[str]]]
"""Rows of one split, the settings of their source, and the split's name -> tasks, and notes."""


@dataclass
class Found:
    """Tasks read from one source, or from all.

    Args:
        heldout: tasks of splits that are named as held out.
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
    for name in rewards:
        source = REWARDS.row(name).source if name in REWARDS else ""
        others = [other for other in data.names if other != source]
        if source and others:
            raise UserError(
                f"reward {name!r} scores tasks of data.source = {source!r} only, not of"
                f" {others[0]!r}"
            )

    return load_rows(data, seed, as_tasks(rewards))


def as_tasks(rewards: tuple[str, ...]) -> Conversion:
    """Conversion of rows into tasks that these rewards can check."""

    def convert(
        rows: Sequence[Row], section: DataConfig, name: str
    ) -> tuple[list[Task], list[str]]:
        return rows_to_tasks(rows, section, name=name, rewards=rewards)

    return convert


def load_rows(
    data: DataConfig, seed: int, convert: Conversion, key: Callable[[Task], str] = prompt_key
) -> TaskSet:
    """The tasks of a recipe, from rows that a function converts.

    Args:
        data: the recipe's [data] section.
        seed: draws the held-out tasks and, with a limit, the rows.
        convert: called with the rows of one split, the settings of their source, and the name of
            the split. Returns tasks, and notes for the user.
        key: equal for two tasks if one must not be trained on while the other is held out.

    Raises:
        UserError: if a source is missing, empty or malformed.
    """
    if data.sources:
        return _mixture(data, seed, convert, key)
    found = read_source(data, seed, convert)
    made = _halves(found, data, seed, key)
    made.hub_commits = {data.source: found.commit} if found.commit else {}
    return made


def _mixture(
    data: DataConfig, seed: int, convert: Conversion, key: Callable[[Task], str]
) -> TaskSet:
    """Tasks of several sources.

    Ids get the source's name as prefix, and each task names its source.
    """
    everything, commits = Found(), {}
    for source in data.sources:
        found = read_source(section_of(source, data), seed, convert)
        for tasks, into in ((found.train, everything.train), (found.heldout, everything.heldout)):
            into += [
                replace(task, id=f"{source.label}/{task.id}", source=source.label) for task in tasks
            ]
        everything.notes += [f"{source.label}: {note}" for note in found.notes]
        if found.commit:
            commits[source.label] = found.commit
    made = _halves(everything, data, seed, key)
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


def section_of(source: SourceConfig, data: DataConfig) -> DataConfig:
    """The [data] section as if it had only this source."""
    own = {
        name: value
        for name, value in source
        if value is not None and name in DataConfig.model_fields
    }
    return data.model_copy(update={**own, "sources": ()})


def _halves(found: Found, data: DataConfig, seed: int, key: Callable[[Task], str]) -> TaskSet:
    made = (
        _disjoint(found.train, found.heldout, key)
        if found.heldout
        else _set_aside(found.train, data.heldout, seed, key)
    )
    made.notes = [*found.notes, *made.notes]
    return made


def read_source(data: DataConfig, seed: int, convert: Conversion) -> Found:
    """The tasks of `data.source`. Only those of a named split are held out."""
    if data.source in SOURCES:
        made = load_object(SOURCES[data.source])(data, seed)
        return Found([_with_texts(task, data) for task in made])
    if kind := library_of(data.source):
        return _foreign(kind, data.source.partition(":")[2], data, seed)
    splits, commit = read_splits(data, seed)
    found = Found(commit=commit)
    for split, rows in splits.items():
        if not rows:
            raise UserError(f"dataset {data.source!r} has 0 rows in split {split!r}")
        tasks, notes = convert(rows, data, split)
        into = found.heldout if found.train else found.train
        into += tasks
        found.notes += notes
    return found


def _with_texts(task: Task, data: DataConfig) -> Task:
    """The task with the texts of [data] around its prompt, if that is text."""
    if not isinstance(task.prompt, str):
        return task
    return replace(task, prompt=worded(task.prompt, data), form=task_form(data))


def _foreign(kind: str, name: str, data: DataConfig, seed: int) -> Found:
    """The tasks of another library's environment."""
    make = LIBRARIES.row(kind).tasks
    if not make:
        having = [name for name in LIBRARIES if LIBRARIES.row(name).tasks]
        raise UserError(
            f"data.source = {data.source!r}: environments of kind {kind!r} have no tasks. Use a"
            f" file, or one of {', '.join(having)}"
        )
    train, heldout, notes = load_object(make)(name, data, seed)
    if data.system_prompt or data.prompt_suffix or data.prefill:
        for task in (*train, *heldout):
            if not isinstance(task.prompt, str):
                raise UserError(
                    f"{data.source} writes whole conversations: leave data.system_prompt,"
                    " data.prompt_suffix and data.prefill empty"
                )
    return Found(
        [_with_texts(task, data) for task in train],
        [_with_texts(task, data) for task in heldout],
        notes,
    )


def _set_aside(tasks: list[Task], count: int, seed: int, key: Callable[[Task], str]) -> TaskSet:
    """Hold out the `count` tasks whose hash of seed and id is smallest.

    The order of the list does not matter.
    """
    if count >= len(tasks):
        raise UserError(
            f"data.heldout = {count} of {len(tasks)} tasks leaves none to train on: lower it"
        )
    heldout = drawn_tasks(tasks, count, seed) if count else []
    chosen = {task.id for task in heldout}
    return _disjoint([task for task in tasks if task.id not in chosen], heldout, key)


def _disjoint(train: list[Task], heldout: list[Task], key: Callable[[Task], str]) -> TaskSet:
    """Drop training tasks whose prompt is also held out. A note says how many."""
    prompts = {key(task) for task in heldout}
    kept = [task for task in train if key(task) not in prompts]
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


def read_splits(data: DataConfig, seed: int) -> tuple[Mapping[str, Sequence[Row]], str]:
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
    check_local(data)
    found = {data.split: read_file(Path(data.source), data.limit, seed)}
    if data.heldout_split:
        if not is_file_name(data.heldout_split):
            raise UserError(
                f"{data.source} has no splits: data.heldout_split is another file"
                f" ({', '.join(FILE_TYPES)}), or empty, not {data.heldout_split!r}"
            )
        found[data.heldout_split] = read_file(Path(data.heldout_split), 0, seed)
    return found, ""


def check_local(data: DataConfig) -> None:
    """Raise UserError for settings of hub datasets, beside a source that is a file here."""
    if unused := data.subset or data.revision:
        raise UserError(
            f"{data.source} is a file: data.subset and data.revision are for hub datasets; leave"
            f" out {unused!r}"
        )
