"""Observations of tool calls: the tool's result as text, or a structured error."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic_core import PydanticSerializationError, to_jsonable_python

from ..values import Array

ErrorKind = Literal[
    "malformed",
    "unknown_tool",
    "bad_json",
    "missing_argument",
    "unknown_argument",
    "wrong_argument",
    "exception",
    "timeout",
    "busy",
    "bad_result",
    "too_many_calls",
]
"""How a call failed.

- malformed: a block with the marks of a call cannot be parsed.
- unknown_tool: no tool has this name.
- bad_json: the arguments are not a JSON object.
- missing_argument, unknown_argument, wrong_argument: they do not fit the tool's schema.
- exception: the tool raised an error.
- timeout: the tool did not return within its time limit.
- busy: an earlier call of the episode still runs, or all slots are in use.
- bad_result: the result of the tool has no JSON form.
- too_many_calls: the reply has more calls than the limit.
"""


class ToolError(Exception):
    """A call failed. The policy reads the message.

    A tool may raise it to choose the message. For other errors, the policy also reads the class.

    Attributes:
        kind: how the call failed, see `ErrorKind`.
    """

    def __init__(self, message: str, kind: str = "exception") -> None:
        super().__init__(encodable(message))
        self.kind = kind


class ToolsFailed(Exception):
    """The tools cannot work, for a reason other than the policy's call. The episode fails."""


def error_text(kind: str, message: str) -> str:
    """Text of a structured error, as the policy reads it."""
    return json.dumps({"error": {"kind": kind, "message": message}}, ensure_ascii=False)


def result_text(result: Any) -> str:
    """A tool's result as the policy reads it: text unchanged, None as "", other values as JSON.

    Raises:
        ToolError: the result has no JSON form.
    """
    if isinstance(result, str):
        text = result
    elif result is None:
        text = ""
    else:
        try:
            plain = to_jsonable_python(result, fallback=_listed)
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        except (PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
            name = type(result).__name__
            problem = f"the tool returned a {name} that has no JSON form"
            raise ToolError(problem, "bad_result") from error
    return encodable(text)


def encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which no tokenizer and no file takes."""
    return text.encode("utf-8", "replace").decode()


def _listed(value: object) -> Any:
    """A number, array or tensor of an array library as Python numbers."""
    if isinstance(value, Array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def shortened(text: str, limit: int) -> str:
    """A result of at most `limit` characters, with a note if it is cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {limit} of {len(text)} characters]"
