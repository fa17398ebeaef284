"""Chat messages of a data row: check roles, their order, and that every message has text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..types import Message
from .json_text import json_type

ROLES = ("system", "user", "assistant")


def chat_messages(where: str, value: Sequence[Any]) -> list[Message]:
    """The messages of a prompt. Fields other than role and content are dropped.

    Args:
        where: place for error messages.
        value: objects with "role" and "content". Content is text, or a list of text parts.

    Raises:
        UserError: if a message is malformed or empty, or has an unknown role.
    """
    if not value:
        raise UserError(f"{where}: empty prompt")
    return [_message(where, message) for message in value]


def check_turns(where: str, messages: Sequence[Message]) -> None:
    """Check the order of roles: an optional system message, then user and assistant in turn.

    Raises:
        UserError: if the order is different, or the last message is not from the user.
    """
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise UserError(f"{where}: a system message comes first or not at all")
    if any(role != ("user", "assistant")[number % 2] for number, role in enumerate(turns)):
        raise UserError(f"{where}: roles must alternate, beginning with user: {', '.join(roles)}")
    if not turns or turns[-1] != "user":
        raise UserError(f"{where}: last message must be from user, is from {roles[-1]}")


def _message(where: str, message: Any) -> Message:
    content = _text(where, message.get("content")) if isinstance(message, Mapping) else None
    if content is None or not isinstance(message.get("role"), str):
        raise UserError(
            f"{where}: a message is an object with text in 'role' and 'content', got"
            f" {str(message)[:60]}"
        )
    if message["role"] not in ROLES:
        raise UserError(f"{where}: unknown role {message['role']!r}; expected {', '.join(ROLES)}")
    if not content.strip():
        raise UserError(f"{where}: empty prompt (a message without content)")
    return Message(role=message["role"], content=content)


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
