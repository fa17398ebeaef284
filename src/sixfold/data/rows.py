"""One row of a dataset -> one Task, or one line that says what is wrong with the row.

Invariants: a prompt is not empty; chat messages alternate and end with the user; text is valid Unicode; nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import Any

from sixfold.config import DataConfig
from sixfold.data.files import Row, json_type
from sixfold.errors import UserError, nearest
from sixfold.types import Message, Task

NEED_ANSWER = ("arithmetic", "math")
ROLES = ("system", "user", "assistant")


def rows_to_tasks(rows: Sequence[Row], data: DataConfig, *, name: str, rewards: Sequence[str]) -> list[Task]:
    """The tasks of `rows`. Ids are the `id` column, or `name` and the position. Raises UserError for the first row that is no task."""
    needs_answer = any(reward in NEED_ANSWER for reward in rewards)
    required = [data.prompt_field, *([data.answer_field] if needs_answer else []), *([data.trace_field] if data.trace_field else [])]
    for field in required:
        _require(rows, field, rewards if field == data.answer_field else ())
    tasks = [_task(row, f"{name}-{number}", data, needs_answer) for number, row in enumerate(rows)]
    for task, row in zip(tasks, rows, strict=True):
        if "arithmetic" in rewards and not str(task.answer).strip().lstrip("-").isdigit():
            raise UserError(f"{row.where}: reward 'arithmetic' needs an integer in {data.answer_field!r}, got {str(task.answer)[:40]!r}")
    _check_ids(tasks, rows)
    return tasks


def _require(rows: Sequence[Row], field: str, rewards: Sequence[str]) -> None:
    missing = [row for row in rows if field not in row.fields]
    if not missing:
        return
    keys = list(missing[0].fields)
    more = f"; so have {len(missing) - 1} more rows ({', '.join(row.where for row in missing[1:5])})" if len(missing) > 1 else ""
    reason = f", which reward {rewards[0]!r} checks against" if rewards else ""
    raise UserError(f"{missing[0].where}: missing field {field!r}{reason} (row keys: {keys}){more}.{nearest(field, keys)}")


def _task(row: Row, default_id: str, data: DataConfig, needs_answer: bool) -> Task:
    for field, value in row.fields.items():
        _check_value(row.where, field, value)
    trace = row.fields.get(data.trace_field) if data.trace_field else None
    if data.trace_field and not (isinstance(trace, str) and trace):
        raise UserError(f"{row.where}: {data.trace_field!r} must be text, got {json_type(trace) if trace is None or trace else 'nothing'}")
    identity = row.fields.get("id")
    return Task(
        id=default_id if identity is None else str(identity),
        prompt=_prompt(row, data),
        answer=_answer(row, data, needs_answer),
        trace=trace,
        columns=row.fields,
        source=data.source,
    )


def _answer(row: Row, data: DataConfig, needed: bool) -> Any:
    """The reference answer. Built-in rewards check text and numbers; a reward of the user's own gets whatever the column holds."""
    answer = row.fields.get(data.answer_field)
    if needed and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise UserError(f"{row.where}: {data.answer_field!r} must be text or a number, got {json_type(answer)}")
    if data.answer_after and isinstance(answer, str):
        _, marker, answer = answer.rpartition(data.answer_after)
        if not marker:
            raise UserError(f"{row.where}: no {data.answer_after!r} in {data.answer_field!r} (data.answer_after)")
        answer = answer.strip()
    if needed and isinstance(answer, str) and not answer.strip():
        raise UserError(f"{row.where}: empty answer in {data.answer_field!r}")
    return answer


def _prompt(row: Row, data: DataConfig) -> str | tuple[Message, ...]:
    """Text stays text; with a system prompt it becomes messages. Messages stay messages."""
    value = row.fields[data.prompt_field]
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{row.where}: empty prompt")
        text = value + data.prompt_suffix
        if not data.system_prompt:
            return text
        return (Message(role="system", content=data.system_prompt), Message(role="user", content=text))
    if not isinstance(value, list):
        raise UserError(f"{row.where}: {data.prompt_field!r} must be text or a list of messages, got {json_type(value)}")
    if not value:
        raise UserError(f"{row.where}: empty prompt")
    messages = [_message(row.where, message) for message in value]
    if data.system_prompt:
        if messages[0]["role"] == "system":
            raise UserError(f"{row.where}: the row has a system message of its own: leave data.system_prompt empty")
        messages.insert(0, Message(role="system", content=data.system_prompt))
    _check_turns(row.where, messages)
    messages[-1] = Message(role="user", content=messages[-1]["content"] + data.prompt_suffix)
    return tuple(messages)


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: a message is an object with text in 'role' and 'content', got {str(message)[:60]}")
    if message["role"] not in ROLES:
        raise UserError(f"{where}: unknown role {message['role']!r}; want {', '.join(ROLES)}")
    if not message["content"].strip():
        raise UserError(f"{where}: empty prompt (a message without content)")
    return Message(role=message["role"], content=message["content"])


def _check_turns(where: str, messages: Sequence[Message]) -> None:
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise UserError(f"{where}: a system message comes first or not at all")
    if any(role != ("user", "assistant")[number % 2] for number, role in enumerate(turns)):
        raise UserError(f"{where}: roles must alternate, beginning with user: {', '.join(roles)}")
    if not turns or turns[-1] != "user":
        raise UserError(f"{where}: last message must be from user, is from {roles[-1]}")


def _check_value(where: str, field: str, value: Any) -> None:
    """Refuse text that no tokenizer can encode, and pickles."""
    if isinstance(value, bytes) and value.startswith(b"\x80") and value.endswith(b"."):
        raise UserError(f"{where}: column {field!r} is a pickle (unpickling is disabled): convert it to JSON")
    if not isinstance(value, str):
        for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
            _check_value(where, field, part)
        return
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: {field!r} holds a lone surrogate at character {error.start}: invalid UTF-8") from error
    if value.startswith(("eJ", "gAS")) and _is_encoded_pickle(value):
        raise UserError(f"{where}: column {field!r} is a pickle (unpickling is disabled): convert it to JSON")


def _is_encoded_pickle(text: str) -> bool:
    """Whether text is base64 of a pickle, compressed by zlib or not (LiveCodeBench's private tests are). Looks at the first bytes only."""
    try:
        head = base64.b64decode(text[:64], validate=True)
        if text.startswith("eJ"):
            head = zlib.decompressobj().decompress(head, 2)
    except (binascii.Error, zlib.error, ValueError):
        return False
    return len(head) > 1 and head[0] == 0x80 and head[1] <= 5


def _check_ids(tasks: Sequence[Task], rows: Sequence[Row]) -> None:
    seen: dict[str, str] = {}
    for task, row in zip(tasks, rows, strict=True):
        if task.id in seen:
            raise UserError(f"duplicate id {task.id!r} ({seen[task.id]} and {row.where}): sampling noise and resume need unique ids")
        seen[task.id] = row.where
