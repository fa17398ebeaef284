"""Solutions with a label for each step: rows in the forms of TRL, PRM800K, Math-Shepherd and
ProcessBench.

A label is the probability that the step is right: 1, 0, or between. None: it was not labelled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import UserError
from ..recipe.schema import DataConfig
from ..types import Task
from .columns import MISSING, lookup
from .files import Row
from .messages import stored_messages
from .prompts import column_value, shown_tools, task_form, task_prompt, template_arguments
from .rows import check_ids, check_value, require, row_id, tool_notes
from .sources import load_rows
from .task_set import TaskSet

_MARK, _FIRST = "ки", "Step 1:"
"""Math-Shepherd's mark after every step, and the start of its solutions."""
_MARKS = re.compile(rf"(?<![^\W\d_]){_MARK}(?![^\W\d_])")
"""The mark, where it is no part of a word."""
_DEFAULT = DataConfig.model_fields["prompt_field"].default
_RATINGS = {-1: 0.0, 0: 1.0, 1: 1.0}
"""PRM800K's ratings. A neutral step is no error: arXiv:2305.20050, section 2.6."""


@dataclass(frozen=True)
class LabelledSolution(Task):
    """A prompt with a solution.

    Attributes:
        steps: texts of the steps. None is blank.
        labels: label of each step. At least one is known.
        separator: text after each step but the last. None: that of the recipe.
    """

    steps: tuple[str, ...] = ()
    labels: tuple[float | None, ...] = ()
    separator: str | None = None


class _Solution(NamedTuple):
    """A solution as a row has it: steps with their labels, and what its id adds to the row's."""

    prompt: Any
    steps: Sequence[tuple[str, float | None]]
    suffix: str = ""
    separator: str | None = None


def load_step_labels(data: DataConfig, *, seed: int) -> TaskSet:
    """The labelled solutions of a recipe. No prompt is both trained and held out.

    Args:
        data: the recipe's [data] section.
        seed: draws the held-out solutions and, with a limit, the rows.

    Raises:
        UserError: a source is missing or empty, or a row is malformed. Names file and line.
    """
    return load_rows(data, seed, _convert)


def _convert(rows: Sequence[Row], data: DataConfig, name: str) -> tuple[list[Task], list[str]]:
    """Solutions and notes from the rows of one split."""
    columns, read = _form(rows[0], data)
    for column in columns:
        require(rows, "steps with labels", column)
    tasks: list[Task] = []
    of_row: list[Row] = []
    blank = unlabelled = 0
    for row in rows:
        for column, value in row.fields.items():
            check_value(row.where, column, value)
        for solution in read(row, data):
            steps = [(text, label) for text, label in solution.steps if text.strip()]
            blank += len(solution.steps) - len(steps)
            if all(label is None for _, label in steps):
                unlabelled += 1
                continue
            prompt = replace(row, fields={data.prompt_field: solution.prompt})
            identity = row_id(row, data.id_field) or f"{name}-{row.number}"
            tasks.append(
                LabelledSolution(
                    identity + solution.suffix,
                    task_prompt(prompt, data),
                    source=data.source,
                    tools=shown_tools(row) or (),
                    template_args=template_arguments(row),
                    form=task_form(data),
                    steps=tuple(text for text, _ in steps),
                    labels=tuple(label for _, label in steps),
                    separator=solution.separator,
                )
            )
            of_row.append(row)
    notes = [
        f"split '{name}': {count} {what} left out"
        for count, what in (
            (blank, "blank steps are"),
            (unlabelled, "solutions without labels are"),
        )
        if count
    ]
    if not tasks:
        raise UserError(f"split '{name}' has no labelled step in {len(rows)} rows")
    check_ids(tasks, of_row, data.id_field)
    return tasks, notes + tool_notes(rows, name)


_Reader = Callable[[Row, DataConfig], Iterator[_Solution]]


def _form(row: Row, data: DataConfig) -> tuple[tuple[str, ...], _Reader]:
    """Columns and reader of the form of a split, judged by its first row."""
    known: dict[tuple[str, ...], _Reader] = {
        (_prompt_column(row, data), "completions", "labels"): _stepwise,
        ("question.problem", "label.steps"): _prm800k,
        ("problem", "steps", "label"): _processbench,
        ("input", "label"): _math_shepherd,
    }
    for columns, read in known.items():
        if all(lookup(row.fields, name) is not MISSING for name in columns):
            return columns, read
    raise UserError(
        f"{row.where}: no solution with labelled steps: expected the columns"
        f" {', or '.join(' and '.join(names) for names in known)}; row keys: {list(row.fields)}."
        " data.prompt_field names another column of prompts"
    )


def _stepwise(row: Row, data: DataConfig) -> Iterator[_Solution]:
    """TRL's form: `completions`, a list of steps, and `labels`."""
    steps, labels = (column_value(row, name) for name in ("completions", "labels"))
    _check_steps(row, "completions", steps)
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise UserError(
            f"{row.where}: 'labels' must be a list with one label for each of the {len(steps)}"
            f" steps in 'completions', got {labels!r:.60}"
        )
    prompt = stored_messages(row.where, column_value(row, _prompt_column(row, data)))
    found = [(step, _label(row, label)) for step, label in zip(steps, labels, strict=True)]
    separator = column_value(row, "separator")  # of a stage of kind `sample`
    yield _Solution(prompt, found, separator=separator if isinstance(separator, str) else None)


def _prompt_column(row: Row, data: DataConfig) -> str:
    """Column of the prompt: the one that is named, or by default also TRL's."""
    asked = data.prompt_field
    return asked if asked != _DEFAULT or lookup(row.fields, asked) is not MISSING else "prompt"


def _processbench(row: Row, data: DataConfig) -> Iterator[_Solution]:
    """ProcessBench's form: `label` is the number of the first wrong step from 0, or -1."""
    steps, first = column_value(row, "steps"), column_value(row, "label")
    _check_steps(row, "steps", steps)
    if type(first) is not int or not -1 <= first < len(steps):
        raise UserError(
            f"{row.where}: 'label' must be the number of the first wrong step, 0 to"
            f" {len(steps) - 1}, or -1 if all are right, got {first!r:.60}"
        )
    right = [1.0] * (len(steps) if first < 0 else first)
    labels = [*right, 0.0, *[None] * len(steps)][: len(steps)]
    yield _Solution(column_value(row, "problem"), list(zip(steps, labels, strict=True)))


def _math_shepherd(row: Row, data: DataConfig) -> Iterator[_Solution]:
    """Math-Shepherd's form: `label` is `input` with + or - in place of every mark."""
    text, labelled = column_value(row, "input"), column_value(row, "label")
    if not isinstance(text, str) or not isinstance(labelled, str):
        raise UserError(f"{row.where}: 'input' and 'label' must be texts")
    problem, first, rest = text.partition(_FIRST)
    if not first:
        raise UserError(f"{row.where}: 'input' has no {_FIRST!r}, where the solution begins")
    *pieces, after = _MARKS.split(text)
    signs, at = [], 0
    for piece in pieces:
        at += len(piece) + 1
        signs.append(labelled[at - 1 : at])
    marked = "".join(piece + sign for piece, sign in zip(pieces, signs, strict=True)) + after
    if labelled != marked or set(signs) - {"+", "-"}:
        raise UserError(
            f"{row.where}: 'label' is not 'input' with + or - in place of every {_MARK!r}"
        )
    *steps, end = _MARKS.split(first + rest)
    labels = [float(sign == "+") for sign in signs[-len(steps) :]] if steps else []
    found: list[tuple[str, float | None]] = [
        (step.strip(), label) for step, label in zip(steps, labels, strict=True)
    ]
    yield _Solution(problem.strip(), [*found, (end.strip(), None)] if end.strip() else found)


def _prm800k(row: Row, data: DataConfig) -> Iterator[_Solution]:
    """PRM800K's form. The chosen steps are one solution, and every other rated step ends one."""
    prompt, given = column_value(row, "question.problem"), column_value(row, "label.steps")
    path: list[tuple[str, float | None]] = []
    if not isinstance(given, list):
        raise UserError(f"{row.where}: 'label.steps' must be a list, got {given!r:.60}")
    for number, step in enumerate(given):
        rated = step.get("completions") if isinstance(step, Mapping) else None
        if not isinstance(rated, list) or not all(isinstance(one, Mapping) for one in rated):
            raise UserError(f"{row.where}: step {number} of 'label.steps' has no 'completions'")
        chosen, human = step.get("chosen_completion"), step.get("human_completion")
        found = [(one.get("text"), _rating(row, one.get("rating"))) for one in rated]
        _check_steps(row, f"label.steps.{number}.completions", [text for text, _ in found])
        if chosen is None and not human:  # the solution ends with wrong steps
            chosen = 0 if number + 1 == len(given) and found else None
        if chosen is not None and not (type(chosen) is int and 0 <= chosen < len(found)):
            raise UserError(
                f"{row.where}: step {number} of 'label.steps': chosen_completion is {chosen!r:.40},"
                f" but it has {len(found)} completions"
            )
        for other, (text, label) in enumerate(found):
            if other != chosen and label is not None:
                before: list[tuple[str, float | None]] = [(said, None) for said, _ in path]
                yield _Solution(prompt, [*before, (text, label)], f"/{number}.{other}")
        if chosen is not None:
            path.append(found[chosen])
        elif isinstance(human, Mapping) and isinstance(human.get("text"), str):
            path.append((human["text"], None))
        else:
            break
    yield _Solution(prompt, path)


def _rating(row: Row, rating: Any) -> float | None:
    if rating is not None and (type(rating) not in (int, float) or rating not in _RATINGS):
        raise UserError(f"{row.where}: a rating must be -1, 0, 1 or null, got {rating!r:.40}")
    return None if rating is None else _RATINGS[rating]


def _label(row: Row, label: Any) -> float | None:
    if label is None:
        return None
    if isinstance(label, bool | int | float) and math.isfinite(label) and 0 <= label <= 1:
        return float(label)
    raise UserError(
        f"{row.where}: a label must be true, false, a number from 0 to 1 or null, got {label!r:.40}"
    )


def _check_steps(row: Row, column: str, steps: Any) -> None:
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{row.where}: {column!r} must be a list of texts, got {steps!r:.60}")
