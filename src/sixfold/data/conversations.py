"""Conversations to imitate, from the forms of public datasets.

Each row becomes one Task. A conversation is its whole list of messages, replies included. A reply
that is not trained has `weight` 0, as in OpenAI's fine-tuning files. A pair of texts is a prompt
with a worked solution (`Task.trace`), so a model without a chat template can learn it too.

| form | columns |
|---|---|
| messages, conversations | a list of messages, with names of OpenAI or ShareGPT |
| prompt_completion | two texts, or two lists of messages (TRL); only the second is trained |
| alpaca | `instruction`, perhaps `input`, and `output`; perhaps `history`, pairs of earlier turns |

Beside them, `tools`, `chat_template_kwargs` and `system` are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ..errors import UserError
from ..recipe.schema import DataConfig
from ..types import Message, Task, is_trained
from .columns import MISSING, lookup
from .files import Row
from .json_text import json_type
from .messages import chat_messages, check_turns, has_empty_turn, stored_messages
from .prompts import (
    add_system_prompt,
    column_value,
    shown_tools,
    task_form,
    template_arguments,
    with_own_system,
    worded,
)
from .rows import check_ids, check_value, row_id, tool_notes
from .sources import load_rows
from .task_set import TaskSet, prompt_key

Form = Literal["auto", "messages", "conversations", "prompt_completion", "alpaca"]

_COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
_ROLES = ("user", "assistant")
_DEFAULT = DataConfig.model_fields["prompt_field"].default

_ALPACA = (
    "Below is an instruction that describes a task{given}. Write a response that appropriately"
    " completes the request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:"
)
_ALPACA_GIVEN = ", paired with an input that provides further context"
"""Prompt of Stanford Alpaca (tatsu-lab/stanford_alpaca, train.py)."""


class NoReply(Exception):
    """The row has no reply to imitate. The message says why."""


def load_conversations(data: DataConfig, *, seed: int, form: Form, chat: bool) -> TaskSet:
    """The conversations of a recipe, those to train on and those that are held out.

    A conversation is not trained on if another one with the same messages before its first trained
    reply is held out.

    Args:
        data: the recipe's [data] section. `answer_field` or `trace_field` names the completion if
            the prompt has the column `prompt_field`.
        seed: draws the held-out conversations and, with a limit, the rows.
        chat: whether the model has a chat template. Without one, Alpaca rows get Alpaca's prompt.

    Raises:
        UserError: a source is missing or empty, or a row has another form. Names file and line.
    """
    return load_rows(data, seed, partial(_conversations, form=form, chat=chat), _opening)


def _opening(task: Task) -> str:
    """Key of the messages before the first trained reply."""
    if isinstance(task.prompt, str):
        return prompt_key(task)
    first = next((i for i, m in enumerate(task.prompt) if is_trained(m)), len(task.prompt))
    return prompt_key(replace(task, prompt=task.prompt[:first]))


def _conversations(
    rows: Sequence[Row], data: DataConfig, name: str, *, form: Form, chat: bool
) -> tuple[list[Task], list[str]]:
    """Tasks and notes from the rows of one split."""
    tasks, kept, dropped = [], [], Counter[str]()
    for row in rows:
        named, columns = recognise_conversation(row, data, form)
        for field, value in row.fields.items():
            check_value(row.where, field, value)
        try:
            task = conversation(row, data, named, columns, chat)
        except NoReply as reason:
            if data.unanswered == "error":
                raise UserError(
                    f"{row.where}: {reason}. Add a reply, or leave such rows out by data.unanswered"
                    " = 'drop'"
                ) from reason
            dropped[str(reason)] += 1
            continue
        tasks.append(replace(task, id=row_id(row, data.id_field) or f"{name}-{row.number}"))
        kept.append(row)
    if not tasks:
        raise UserError(f"split '{name}' has 0 usable rows of {len(rows)}: {next(iter(dropped))}")
    check_ids(tasks, kept, data.id_field)
    notes = [
        f"split '{name}': {count} of {len(rows)} rows are left out: {reason} (data.unanswered ="
        " 'drop')"
        for reason, count in dropped.items()
    ]
    return tasks, notes + tool_notes(kept, name)


def recognise_conversation(row: Row, data: DataConfig, form: Form) -> tuple[str, tuple[str, ...]]:
    """Form of a row and its columns. Forms whose columns have values go before those with nulls:
    in a table of several sources, rows have the columns of all.

    Raises:
        UserError: the row has no columns of the form, or of any form.
    """
    own = (data.prompt_field, data.trace_field or data.answer_field)
    made = ("prompt", own[1])  # by `sixfold data`
    known = [*_COLUMNS.items(), ("prompt_completion", own), ("prompt_completion", made)]
    if data.prompt_field != _DEFAULT:  # the user has named the column
        listed = [("messages", own[:1]), ("conversations", own[:1])]
        known = [("prompt_completion", own), *listed, ("alpaca", _COLUMNS["alpaca"])]
    choices = [(one, columns) for one, columns in known if form in ("auto", one)]
    for absent in ((MISSING, None), (MISSING,)):
        for one, columns in choices:
            if all(lookup(row.fields, column) not in absent for column in columns):
                return one, columns
    wanted = dict.fromkeys(" and ".join(columns) for _, columns in choices)
    raise UserError(
        f"{row.where}: no columns of a conversation (sft.form = {form!r}): expected"
        f" {', or '.join(wanted)}; row keys:"
        f" {list(row.fields)}. data.prompt_field and data.answer_field name others"
    )


def conversation(
    row: Row, data: DataConfig, form: str, columns: tuple[str, ...], chat: bool
) -> Task:
    """The conversation of a row, without its id.

    Args:
        data: the recipe's [data] section.
        form: form of the row, and `columns` its columns, from `recognise_conversation`.
        columns: see `form`.
        chat: as for `load_conversations`.

    Raises:
        UserError: a value has another type or range.
        NoReply: the row has no reply to imitate.
    """
    values = [column_value(row, column) for column in columns]
    if form != "alpaca":
        values = _messages_of(row, values)
    data = with_own_system(row, data)
    if form == "alpaca":
        given, history = column_value(row, "input"), column_value(row, "history")
        values[0] = _alpaca(row, values[0], "" if given in (MISSING, None) else given, chat)
        if history not in (MISSING, None, []):
            values = _after_history(row, history, values)
    task = (
        _pair(row, columns, values, data)
        if isinstance(values[0], str) and len(values) == 2
        else _chat(row, columns, values, data)
    )
    return replace(
        task,
        source=data.source,
        tools=shown_tools(row) or (),
        template_args=template_arguments(row),
    )


def _messages_of(row: Row, values: list[Any]) -> list[Any]:
    """The values, with lists of messages in place of their JSON text, and of a reply after one."""
    read = [stored_messages(row.where, values[0]), *values[1:]]
    if len(read) == 2 and isinstance(read[0], list):
        read[1] = stored_messages(row.where, read[1])
        if isinstance(read[1], str):
            read[1] = [{"role": "assistant", "content": read[1]}]
    return read


def _after_history(row: Row, history: Any, values: Sequence[Any]) -> list[Any]:
    """An Alpaca row with earlier turns, pairs of texts as LLaMA-Factory has them, as messages."""
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in history
    ):
        raise UserError(
            f"{row.where}: 'history' must be a list of pairs of texts, got {str(history)[:60]}"
        )
    if not (isinstance(values[1], str) and values[1].strip()):
        raise NoReply("'output' is empty")
    turns = [(role, text) for turn in history for role, text in zip(_ROLES, turn, strict=True)]
    said = [{"role": role, "content": text} for role, text in (*turns, ("user", values[0]))]
    return [said, [{"role": "assistant", "content": values[1]}]]


def _alpaca(row: Row, instruction: Any, given: Any, chat: bool) -> str:
    """The prompt of an Alpaca row."""
    for column, value in (("instruction", instruction), ("input", given)):
        if not isinstance(value, str):
            raise UserError(f"{row.where}: {column!r} must be text, got {json_type(value)}")
    if not instruction.strip():
        raise UserError(f"{row.where}: empty prompt")
    if chat:
        return f"{instruction}\n\n{given}" if given.strip() else str(instruction)
    return _ALPACA.format(
        given=_ALPACA_GIVEN if given.strip() else "",
        instruction=instruction,
        input=f"\n\n### Input:\n{given}" if given.strip() else "",
    )


def _pair(row: Row, columns: Sequence[str], values: Sequence[Any], data: DataConfig) -> Task:
    """A prompt and its completion, both texts."""
    prompt, completion = values
    if completion is None or completion == "":
        raise NoReply(f"{columns[1]!r} is empty")
    if isinstance(completion, int | float) and not isinstance(completion, bool):
        completion = str(completion)  # as a reward reads an answer
    if not isinstance(completion, str):
        raise UserError(
            f"{row.where}: {columns[1]!r} must be text or a number, as {columns[0]!r} is text, got"
            f" {json_type(completion)}"
        )
    if not completion.strip():
        raise NoReply(f"{columns[1]!r} is empty")
    if not prompt.strip():
        raise UserError(f"{row.where}: empty prompt")
    rendered = data.prompt_form == "rendered"
    told = prompt + data.prompt_suffix if rendered else worded(prompt, data)
    return Task("", told, trace=completion, form=task_form(data))


def _chat(row: Row, columns: Sequence[str], values: Sequence[Any], data: DataConfig) -> Task:
    """A conversation, from one list of messages, or from two of which the second is trained."""
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, list):
            raise UserError(
                f"{row.where}: {column!r} must be a list of messages, got {json_type(value)}"
            )
    for setting in ("prefill", "prompt_suffix"):
        if getattr(data, setting):
            raise UserError(
                f"data.{setting} has no place in whole conversations ({row.where}): leave it empty"
            )
    if data.prompt_form != "messages":
        raise UserError(
            f"data.prompt_form = {data.prompt_form!r} is not for whole conversations"
            f" ({row.where}): use 'messages'"
        )
    if has_empty_turn([message for value in values for message in value], ("assistant",)):
        raise NoReply("a reply of the assistant is empty")
    parts = [chat_messages(row.where, value) for value in values]
    before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in parts[0]]
    messages: list[Any] = [*before, *parts[1]] if len(parts) == 2 else parts[0]
    add_system_prompt(row, messages, data)
    return Task("", tuple(_until_last_reply(row, messages)))


def _until_last_reply(row: Row, messages: list[Message]) -> list[Message]:
    """The messages up to the last trained reply. No reply reads those after it."""
    for message in messages:
        if message.get("weight", 1) not in (0, 1):
            raise UserError(
                f"{row.where}: the weight of a message is 0 (not trained) or 1, got"
                f" {message.get('weight')!r}"
            )
    trained = [at for at, message in enumerate(messages) if is_trained(message)]
    if not trained:
        replies = any(message["role"] == "assistant" for message in messages)
        raise NoReply(
            "every reply has weight 0" if replies else "the conversation has no reply to imitate"
        )
    before = messages[: trained[-1]]
    if not before:
        raise UserError(f"{row.where}: a conversation begins with a message of user or system")
    check_turns(row.where, before)
    return messages[: trained[-1] + 1]
