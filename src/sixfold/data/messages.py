"""Chat messages of a data row: read their forms, and check roles, order and text.

Messages are OpenAI's (`role`, `content`, `tool_calls`) or ShareGPT's (`from`, `value`). A column of
them may be their JSON text, as in CSV files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..types import Message
from .json_text import json_type, parse_json

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"bing": "assistant", "bard": "assistant", "function_call": "assistant"},
    **{"observation": "tool", "function_response": "tool", "tool_response": "tool"},
}
"""Names of ShareGPT for the roles of messages. The other names are the same."""

_ARGUMENTS = ("arguments", "parameters", "input")
"""Names for the arguments of a call: OpenAI's, Llama's and Anthropic's."""

_JSON = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")
"""Starts of a list of messages, as JSON and as Python prints it."""


def stored_messages(where: str, value: Any) -> Any:
    """The value of a prompt column. JSON text of messages becomes the list.

    Raises:
        UserError: messages are written in Python's notation, or as invalid JSON.
    """
    if not isinstance(value, str):
        return value
    if _PYTHON.match(value):
        raise UserError(
            f"{where}: the prompt is a list of messages as Python prints it, not JSON. Write it"
            " with json.dumps, or save the file as .jsonl or .parquet"
        )
    return parse_json(where, value) if _JSON.match(value) else value


def chat_messages(where: str, value: Sequence[Any]) -> list[Message]:
    """The messages of a prompt. Their fields are kept, because a chat template may read them.

    Fields of a message that are null are left out.

    Args:
        value: objects with "role" and "content", or with "from" and "value". Content is text, or a
            list of text parts.

    Raises:
        UserError: if a message is malformed or empty, or has an unknown role.
    """
    if not value:
        raise UserError(f"{where}: empty prompt")
    return [_message(where, message) for message in value]


def has_empty_turn(messages: Sequence[Any], roles: Sequence[str] = ("user", "assistant")) -> bool:
    """True if a message of one of these roles has neither text nor calls."""
    return any(
        message.get("role") in roles
        and not message.get("tool_calls")
        and not str(message.get("content") or "").strip()
        for message in (_with_openai_names(one) for one in messages if isinstance(one, Mapping))
    )


def check_turns(where: str, messages: Sequence[Message]) -> None:
    """Check the order of roles: an optional system message, then user and assistant in turn.

    Results of tools stand between a message of the assistant and the next one, or at the end.

    Raises:
        UserError: if the order is different, or the last message is from the assistant.
    """
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise UserError(f"{where}: a system message comes first or not at all")
    after = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}
    after["tool"] = ("tool", "assistant", "user")
    for before, role in zip(("", *turns), turns, strict=False):
        if role not in after[before]:
            raise UserError(
                f"{where}: roles must alternate, beginning with user: {', '.join(roles)}"
            )
    if not turns or turns[-1] == "assistant":
        raise UserError(f"{where}: last message must be from user, is from {roles[-1]}")


def without_nulls(value: Any) -> Any:
    """A JSON value without the fields that are null, see `Row.padded`."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list | tuple) else value


def _message(where: str, given: Any) -> Message:
    named = _with_openai_names(given) if isinstance(given, Mapping) else {}
    message = {key: value for key, value in named.items() if value is not None}
    calls = _calls(where, message.pop("tool_calls", None))
    content = _text(where, message.get("content", "" if calls else None))
    role = message.get("role")
    if content is None or not isinstance(role, str):
        raise UserError(
            f"{where}: a message is an object with text in 'role' and 'content', got"
            f" {str(given)[:60]}"
        )
    if role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; expected {', '.join(ROLES)}")
    # An empty system message is kept: where there is none, some templates write their own.
    if not content.strip() and not calls and role not in ("system", "tool"):
        raise UserError(f"{where}: empty prompt (a message without content)")
    read = {**message, "role": role, "content": content}
    return {**read, "tool_calls": calls} if calls else read  # type: ignore[return-value, typeddict-item]


def _with_openai_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with OpenAI's names of today, if it has ShareGPT's or those of 2023."""
    if "role" in message or "from" not in message:
        known = {key: value for key, value in message.items() if key != "function_call"}
        if known.get("role") == "function":
            known["role"] = "tool"
        if message.get("function_call") and not known.get("tool_calls"):
            known["tool_calls"] = message["function_call"]
        return known
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    name, text = message["from"], message.get("value")
    role = _SHAREGPT.get(str(name), name)
    if name == "function_call":
        return {**rest, "role": role, "content": "", "tool_calls": text}
    return {**rest, "role": role, "content": text}


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them: with arguments that are objects, not JSON text."""
    if isinstance(value, str):
        value = parse_json(f"{where}: tool_calls", value)
    made = []
    for call in [value] if isinstance(value, Mapping) else value or ():
        outer = call if isinstance(call, Mapping) else {}
        inner = outer.get("function", outer)
        function = inner if isinstance(inner, Mapping) else {}
        named = [key for key in _ARGUMENTS if key in function]
        rest = function.keys() - {"name", "id", "type", "index"}
        arguments = function[named[0]] if named else None if rest else {}
        if isinstance(arguments, str):
            arguments = parse_json(f"{where}: arguments of a tool call", arguments)
        if not (isinstance(arguments, Mapping) and isinstance(function.get("name"), str)):
            raise UserError(
                f"{where}: a tool call has a name and an object of arguments, got {str(call)[:60]}"
            )
        called = {"name": function["name"], "arguments": dict(arguments)}
        identity = {"id": outer["id"]} if isinstance(outer.get("id"), str) else {}
        made.append({**identity, "type": "function", "function": called})
    return made


def _text(where: str, content: Any) -> str | None:
    """Content as text. The parts of a list are joined. None if it is neither text nor a list."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else json_type(part)
            raise UserError(
                f"{where}: a message has a part of type {str(kind)[:40]!r}; only text is supported"
            )
    return "".join(part["text"] for part in content)
