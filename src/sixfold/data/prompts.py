"""Prompts of data rows: text, conversations, prefills and rendered texts, and what belongs to them.

A row's conversation is converted once, before anything reads it. A reply of the assistant at its
end is the reference answer, unless `data.prompt_form` says that the policy continues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from ..recipe.schema import DataConfig
from ..types import Message, PromptForm
from .columns import MISSING, lookup
from .files import Row
from .json_text import json_type, parse_json
from .messages import chat_messages, check_turns, stored_messages, without_nulls

TOOLS, ARGUMENTS, SYSTEM = "tools", "chat_template_kwargs", "system"
"""Columns of a row that belong to its prompt: functions, variables of the chat template, and a
system message.
"""

_PROMPTS = ("messages", "conversations", "prompt")
"""Columns with the prompt that are tried if the recipe names none."""

_DEFAULT = DataConfig.model_fields["prompt_field"].default
_RESERVED = {
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of transformers that are no variables of a template."""


def read_conversations(
    rows: Sequence[Row], data: DataConfig, name: str
) -> tuple[list[Row], list[str]]:
    """Convert the conversations of rows, and take the replies at their end out of the prompts.

    Args:
        data: names the column. If it has the default name and is absent, the columns `messages`,
            `conversations` and `prompt` are tried.

    Returns:
        The rows, and notes for the user.

    Raises:
        UserError: for a malformed message.
    """
    read = [_read(row, data) for row in rows]
    ended = sum(row.reply is not None for row in read)
    if not ended:
        return read, []
    return read, [
        f"split '{name}': {ended} of {len(rows)} conversations end with a reply of the assistant,"
        " which is the worked solution, and the reference answer if there is no other. The prompt"
        " is what comes before it (data.prompt_form = 'continued' lets the policy continue it)"
    ]


def _read(row: Row, data: DataConfig) -> Row:
    value = column_value(row, data.prompt_field)
    other = value is MISSING and data.prompt_field == _DEFAULT
    if other:
        value = next((column_value(row, c) for c in _PROMPTS if c in row.fields), MISSING)
    value = stored_messages(row.where, value)
    if not isinstance(value, list):
        found = other and isinstance(value, str)
        return replace(row, fields={**row.fields, data.prompt_field: value}) if found else row
    messages, reply = chat_messages(row.where, value), None
    if data.prompt_form == "messages" and messages[-1]["role"] == "assistant" and messages[1:]:
        reply = messages.pop()
    return replace(
        row,
        fields={**row.fields, data.prompt_field: messages},
        reply=None if reply is None else reply_answer(reply),
    )


def reply_answer(reply: Message) -> Any:
    """The reference answer that a reply is: its text, or its calls if it has no text."""
    if reply["content"].strip():
        return reply["content"]
    return [call["function"] for call in reply["tool_calls"]]


def task_prompt(row: Row, data: DataConfig) -> str | tuple[Message, ...]:
    """The prompt of a row. Text stays text, or becomes messages with a system prompt or a prefill.

    Raises:
        UserError: the prompt is empty, or has not the form that `data.prompt_form` names.
    """
    value = lookup(row.fields, data.prompt_field)
    form = data.prompt_form
    if form == "rendered" and isinstance(value, list) and len(value) == 1:
        value = value[0]["content"]  # TinyZero's files: one message with the rendered text
    if isinstance(value, str) and form != "continued":
        if not value.strip():
            raise UserError(f"{row.where}: empty prompt")
        return value + data.prompt_suffix if form == "rendered" else worded(value, data)
    if not isinstance(value, list) or form == "rendered":
        wanted = {"rendered": "text", "continued": "a list of messages"}
        raise UserError(
            f"{row.where}: {data.prompt_field!r} must be"
            f" {wanted.get(form, 'text or a list of messages')}, got {json_type(value)}"
        )
    return _conversation(row, value, data)


def _conversation(row: Row, messages: list[Message], data: DataConfig) -> tuple[Message, ...]:
    messages, prefill = list(messages), _prefill(data)
    if data.prompt_form == "continued":
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise UserError(
                f"{row.where}: data.prompt_form = 'continued' needs a text of the assistant as last"
                f" message, not one of {messages[-1]['role']}"
            )
        prefill = (messages.pop(),)
    if not messages:
        raise UserError(f"{row.where}: empty prompt (no message before the assistant's)")
    add_system_prompt(row, messages, data)
    check_turns(row.where, messages)
    at = max(i for i, message in enumerate(messages) if message["role"] == "user")
    # A copy: the row's columns keep the messages without the suffix.
    messages[at] = {**messages[at], "content": messages[at]["content"] + data.prompt_suffix}
    return (*messages, *prefill)


def add_system_prompt(row: Row, messages: list[Any], data: DataConfig) -> None:
    """Put the system message of [data], or of the row's column `system`, before the messages.

    Raises:
        UserError: they begin with another one.
    """
    if not data.system_prompt:
        return
    if messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=data.system_prompt))
    elif column_value(row, SYSTEM) != data.system_prompt:
        raise UserError(
            f"{row.where}: the row already has a system message: leave data.system_prompt empty"
        )
    elif messages[0]["content"] != data.system_prompt:
        raise UserError(
            f"{row.where}: the column {SYSTEM!r} is not the system message among the row's"
            " messages. Remove one of them from the row"
        )


def worded(text: str, data: DataConfig) -> str | tuple[Message, ...]:
    """A prompt with the suffix, the system message and the prefill of [data]."""
    text += data.prompt_suffix
    if not (data.system_prompt or data.prefill):
        return text
    system = (Message(role="system", content=data.system_prompt),) if data.system_prompt else ()
    return (*system, Message(role="user", content=text), *_prefill(data))


def task_form(data: DataConfig) -> PromptForm:
    """Form of the prompts of tasks. A prefill makes all of them end within a reply."""
    return "continued" if data.prefill else data.prompt_form


def _prefill(data: DataConfig) -> tuple[Message, ...]:
    return (Message(role="assistant", content=data.prefill),) if data.prefill else ()


def shown_tools(row: Row) -> tuple[Mapping[str, Any], ...] | None:
    """Descriptions of functions in the row's column `tools`, in the form of OpenAI's API.

    Returns:
        None if the column has another form.
    """
    value = column_value(row, TOOLS)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(f"{row.where}: {TOOLS!r}", value)
    if value is MISSING or not value:
        return ()
    found = []
    for tool in value if isinstance(value, list) else [None]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return None
        found.append({"type": "function", "function": dict(function)})
    return tuple(found)


def template_arguments(row: Row) -> Mapping[str, Any]:
    """Variables of the chat template in the row's column `chat_template_kwargs`.

    Raises:
        UserError: it is not an object, or names an argument that is no variable.
    """
    value = column_value(row, ARGUMENTS)
    if isinstance(value, str):
        value = parse_json(f"{row.where}: {ARGUMENTS!r}", value)
    if value is MISSING or value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(
            f"{row.where}: {ARGUMENTS!r} must be an object of variables of the chat template, got"
            f" {json_type(value)}"
        )
    if taken := sorted(_RESERVED & value.keys()):
        raise UserError(
            f"{row.where}: {ARGUMENTS!r} has {taken[0]!r}, which is no variable of a template."
            " Leave it out"
        )
    return dict(value)


def with_own_system(row: Row, data: DataConfig) -> DataConfig:
    """The settings with the system message in the row's column `system`, if it has one.

    Raises:
        UserError: `data.system_prompt` is set too.
    """
    system = column_value(row, SYSTEM)
    if not (isinstance(system, str) and system.strip()):
        return data
    if data.system_prompt:
        raise UserError(
            f"{row.where}: the row already has a system message: leave data.system_prompt empty"
        )
    return data.model_copy(update={"system_prompt": system})


def has_value(row: Row, path: str) -> bool:
    """True if a row has a value at a path that is neither null nor an empty text."""
    return column_value(row, path) not in (MISSING, None, "")


def column_value(row: Row, path: str) -> Any:
    """The value at a path, without the fields that Arrow has added, or MISSING."""
    value = lookup(row.fields, path)
    return without_nulls(value) if row.padded else value
