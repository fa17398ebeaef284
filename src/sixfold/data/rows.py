"""Convert one row of a dataset to one Task, or to a one-line error.

Invariants: a prompt is not empty; chat messages alternate and end with the user; text is valid
Unicode; nothing is unpickled. The answer is converted once: the task's columns hold the converted
answer, so whatever reads the column (rewards of every form, environments, agents) gets it too.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from .. import plugins
from ..environment.registry import reward_row
from ..errors import UserError, nearest
from ..recipe.schema import DataConfig
from ..types import Task
from .columns import MISSING, lookup, paths, with_value
from .files import Row
from .json_text import LONGEST_INTEGER, json_type
from .prompts import (
    TOOLS,
    read_conversations,
    shown_tools,
    task_form,
    task_prompt,
    template_arguments,
)

ROW_FORMATS = "sixfold.row_formats"
"""Entry points of functions that turn rows of a known benchmark into rows with the columns that the
settings name. Each gets (rows, data settings, rewards, name of the split), and returns rows and
notes.
"""

DEEPEST = 100
"""Maximum nesting of one value. Rewards get the columns by pickling, which is recursive."""

_TOO_LARGE = 10**LONGEST_INTEGER
_DEFAULT_ID_FIELD = DataConfig.model_fields["id_field"].default
_DEFAULT_ANSWER_FIELD = DataConfig.model_fields["answer_field"].default


def rows_to_tasks(
    rows: Sequence[Row], data: DataConfig, *, name: str, rewards: Sequence[str]
) -> tuple[list[Task], list[str]]:
    """The tasks of `rows`, and notes for the user.

    Args:
        data: names the columns.
        name: name of the split. A row without an id gets `name` and its position as id.
        rewards: names of the rewards, which decide the required fields.

    Raises:
        UserError: for the first row that is not a valid task.
    """
    untested: list[str] = []
    for form in plugins.names(ROW_FORMATS):
        rows, notes = plugins.load(ROW_FORMATS, form)(rows, data, rewards, name)
        untested += notes
    rows, ended = read_conversations(rows, data, name)
    needed = [reward for reward in rewards if reward_row(reward).answer]
    needs_answer = bool(needed)
    # A user's reward may need no answer, so the column must exist only if it is needed or named.
    answer_asked = (
        needs_answer or data.answer_field != _DEFAULT_ANSWER_FIELD or bool(data.answer_after)
    )
    require(rows, "data.prompt_field", data.prompt_field)
    dropped: list[str] = []
    if needs_answer and data.unanswered == "drop":
        rows, dropped = _drop_unanswered(rows, data, name)
    if answer_asked:
        require(
            [row for row in rows if row.reply is None],
            "data.answer_field",
            data.answer_field,
            needed,
        )
    if data.trace_field:
        require(rows, "data.trace_field", data.trace_field)
    tasks = [_task(row, f"{name}-{row.number}", data, needed) for row in rows]
    for task, row in zip(tasks, rows, strict=True):
        sums = [name for name in rewards if name in ("arithmetic", "worked_sum")]
        if sums and not str(task.answer).strip().lstrip("-").isdigit():
            raise UserError(
                f"{row.where}: reward {sums[0]!r} needs an integer in {data.answer_field!r}, got"
                f" {str(task.answer)[:40]!r}"
            )
    check_ids(tasks, rows, data.id_field)
    notes = untested + ended + dropped + _answer_notes(tasks, rows, data, name)
    return tasks, notes + tool_notes(rows, name)


def tool_notes(rows: Sequence[Row], name: str) -> list[str]:
    """A note about rows whose column of tools is not shown to the model."""
    other = sum(shown_tools(row) is None for row in rows)
    if not other:
        return []
    return [
        f"split '{name}': the column {TOOLS!r} of {other} rows is no list of functions with name"
        " and parameters, so their prompts do not show it"
    ]


def _drop_unanswered(
    rows: Sequence[Row], data: DataConfig, name: str
) -> tuple[Sequence[Row], list[str]]:
    """Leave out rows without an answer. Returns the other rows, and a note about those left out.

    If no row has an answer, all are kept: `require` and `_answer` then name the problem.
    """
    kept = [row for row in rows if not _blank(_found_answer(row, data))]
    if not kept or len(kept) == len(rows):
        return rows, []
    return kept, [
        f"split '{name}': {len(rows) - len(kept)} of {len(rows)} rows have no answer in"
        f" {data.answer_field!r} and are left out (data.unanswered = 'drop')"
    ]


def _found_answer(row: Row, data: DataConfig) -> Any:
    """The row's reference answer as it is stored, or else the reply that ends its conversation."""
    found = lookup(row.fields, data.answer_field)
    return row.reply if found is MISSING and row.reply is not None else found


def _blank(answer: Any) -> bool:
    return answer is MISSING or answer is None or (isinstance(answer, str) and not answer.strip())


def require(rows: Sequence[Row], setting: str, field: str, rewards: Sequence[str] = ()) -> None:
    """Raise UserError if a row lacks a column."""
    missing = [row for row in rows if lookup(row.fields, field) is MISSING]
    if not missing:
        return
    keys = list(paths(missing[0].fields))
    more = (
        f"; {len(missing) - 1} more rows lack it ({', '.join(row.where for row in missing[1:5])})"
        if len(missing) > 1
        else ""
    )
    reason = f", which reward {rewards[0]!r} checks against" if rewards else f" ({setting})"
    shown = [key for key in keys if "." not in key or "." in field]
    raise UserError(
        f"{missing[0].where}: missing field {field!r}{reason} (row keys:"
        f" {shown}){more}.{nearest(field, keys)}"
    )


def _answer_notes(
    tasks: Sequence[Task], rows: Sequence[Row], data: DataConfig, name: str
) -> list[str]:
    unknown = sum(task.answer is None for task in tasks)
    if not unknown:
        return []
    if all(_found_answer(row, data) is MISSING for row in rows):
        hint = nearest(data.answer_field, list(paths(rows[0].fields)))
        return [
            f"split '{name}' has no column {data.answer_field!r} (data.answer_field), so its tasks"
            f" have no reference answer.{hint}"
        ]
    return [
        f"split '{name}': {unknown} of {len(tasks)} rows have no answer in {data.answer_field!r}"
        " (data.answer_field)"
    ]


def _task(row: Row, default_id: str, data: DataConfig, needed: Sequence[str]) -> Task:
    for field, value in row.fields.items():
        check_value(row.where, field, value)
    rendered = data.prompt_form == "rendered"
    own = row.reply if isinstance(row.reply, str) else None
    trace = lookup(row.fields, data.trace_field) if data.trace_field else own
    replies = trace if isinstance(trace, list) else [trace]
    if data.trace_field and not (replies and all(isinstance(r, str) and r for r in replies)):
        raise UserError(
            f"{row.where}: {data.trace_field!r} must be text, or a list of texts, got"
            f" {json_type(trace) if trace is None or trace else 'nothing'}"
        )
    answer, columns = _answer(row, data, needed), row.fields
    if lookup(columns, data.answer_field) is not MISSING:
        columns = with_value(columns, data.answer_field, answer)
    return Task(
        id=row_id(row, data.id_field) or default_id,
        prompt=task_prompt(row, data),
        answer=answer,
        trace=tuple(trace) if isinstance(trace, list) else trace,
        columns=columns,
        source=data.source,
        tools=() if rendered else shown_tools(row) or (),
        template_args={} if rendered else template_arguments(row),
        form=task_form(data),
    )


def row_id(row: Row, field: str) -> str:
    """The row's id, or an empty string if it has none.

    Args:
        field: `data.id_field`.

    Raises:
        UserError: the column is named by the user and absent, or is a list or an object.
    """
    identity = lookup(row.fields, field) if field else MISSING
    if identity is MISSING and field not in ("", _DEFAULT_ID_FIELD):
        require([row], "data.id_field", field)
    if isinstance(identity, list | dict):
        raise UserError(
            f"{row.where}: {field!r} must be text or a number, got {json_type(identity)};"
            " data.id_field names another column"
        )
    return "" if identity is None or identity is MISSING else str(identity)


def _answer(row: Row, data: DataConfig, needed: Sequence[str]) -> Any:
    """The reference answer.

    Built-in rewards check text and numbers, and some of them lists. A user's reward gets whatever
    the column holds.
    """
    found = _found_answer(row, data)
    if needed and _blank(found):
        raise UserError(
            f"{row.where}: empty answer in {data.answer_field!r}. Add it, or leave such rows out"
            " by data.unanswered = 'drop'"
        )
    answer = None if found is MISSING else str(found) if isinstance(found, Decimal) else found
    other = [reward for reward in needed if reward_row(reward).answer != "list"]
    if needed and not isinstance(answer, str | int | float | (str if other else list | dict)):
        taken = "text or a number" if other else "text, a number or a list"
        reason = f" (reward {other[0]!r} takes no other)" if other else ""
        raise UserError(
            f"{row.where}: {data.answer_field!r} must be {taken}, got {json_type(answer)}{reason}"
        )
    if needed and answer == [] and "tool_calls" not in needed:
        raise UserError(f"{row.where}: {data.answer_field!r} is an empty list: no answer is right")
    if needed and isinstance(answer, float) and not math.isfinite(answer):
        raise UserError(
            f"{row.where}: {data.answer_field!r} must be text or a finite number, got {answer}"
        )
    if data.answer_after and isinstance(answer, str):
        _, marker, answer = answer.rpartition(data.answer_after)
        if not marker:
            raise UserError(
                f"{row.where}: no {data.answer_after!r} in {data.answer_field!r}"
                " (data.answer_after)"
            )
        answer = answer.strip()
    if needed and isinstance(answer, str) and not answer.strip():
        raise UserError(
            f"{row.where}: nothing follows {data.answer_after!r} in {data.answer_field!r}"
            " (data.answer_after)"
        )
    return answer


def check_value(where: str, field: str, value: Any) -> None:
    """Check that a value can be tokenized, printed and pickled.

    Args:
        where: place for error messages.
        field: name of the column.
        value: the value, possibly nested.

    Raises:
        UserError: for text that no tokenizer can encode, a pickle, an integer that is too long to
            print, or deep nesting.
    """
    rest = [(value, 1)]
    while rest:
        part, depth = rest.pop()
        if isinstance(part, str):
            _check_text(where, field, part)
        elif isinstance(part, bytes) and part.startswith(b"\x80") and part.endswith(b"."):
            raise UserError(
                f"{where}: column {field!r} is a pickle (unpickling is disabled): convert it to"
                " JSON"
            )
        elif isinstance(part, int) and abs(part) >= _TOO_LARGE:
            raise UserError(
                f"{where}: {field!r} holds an integer of more than {LONGEST_INTEGER:,} digits;"
                " write it as text"
            )
        elif isinstance(part, list | tuple | Mapping):
            if depth > DEEPEST:
                raise UserError(f"{where}: {field!r} is nested more than {DEEPEST} levels deep")
            rest += [
                (inner, depth + 1)
                for inner in (part.values() if isinstance(part, Mapping) else part)
            ]


def _check_text(where: str, field: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: {field!r} holds a lone surrogate at character {error.start}: invalid"
                " UTF-8"
            ) from error
    if text.startswith(("eJ", "gAS")) and _is_encoded_pickle(text):
        raise UserError(
            f"{where}: column {field!r} is a pickle (unpickling is disabled): convert it to JSON"
        )


def _is_encoded_pickle(text: str) -> bool:
    """True if text is base64 of a pickle, with or without zlib compression.

    LiveCodeBench's private tests have this form. Only the first bytes are read.
    """
    try:
        head = base64.b64decode(text[:64], validate=True)
        if text.startswith("eJ"):
            head = zlib.decompressobj().decompress(head, 2)
    except (binascii.Error, zlib.error, ValueError):
        return False
    return len(head) > 1 and head[0] == 0x80 and head[1] <= 5


def check_ids(tasks: Sequence[Task], rows: Sequence[Row], field: str) -> None:
    """Raise UserError if two tasks have the same id.

    Args:
        field: `data.id_field`.
    """
    seen: dict[str, str] = {}
    for task, row in zip(tasks, rows, strict=True):
        if task.id in seen:
            raise UserError(
                f"duplicate id {task.id!r} ({seen[task.id]} and {row.where}): sampling noise and"
                " resume need unique ids; name another column, or set data.id_field = '' to number"
                f" the rows (now {field!r})"
            )
        seen[task.id] = row.where
