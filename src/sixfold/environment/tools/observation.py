"""Observations of tool calls: the tool's result as text, or a structured error."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ..grade import Array

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


MOST_PARTS = 1_000_000
"""Maximum number of values in a result. Their conversion holds Python's global lock."""

_PLAIN = frozenset({str, int, float, bool, type(None)})

DEEPEST = 100
"""Maximum nesting of a result."""


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
        ToolError: the result has no JSON form, is an iterator, is nested too deep, or has too many
            values.
    """
    if isinstance(result, str):
        text = result
    elif result is None:
        text = ""
    else:
        _check_parts(result)
        try:
            plain = to_jsonable_python(result, fallback=_listed)
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        except (PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
            name = type(result).__name__
            problem = f"the tool returned a {name} that has no JSON form"
            raise ToolError(problem, "bad_result") from error
    return encodable(text)


def _check_parts(result: Any) -> None:
    """Refuse a result that the conversion cannot finish, or that would break it.

    An iterator may have no end, and a second reader would find it empty.
    """
    rest, parts = [(result, 0)], 0
    while rest:
        part, depth = rest.pop()
        parts += math.prod(part.shape) if isinstance(part, Array) and hasattr(part, "shape") else 0
        if isinstance(part, Iterator | AsyncIterator):
            problem = f"the tool returned an iterator ({type(part).__name__}). Return a list"
            raise ToolError(problem, "bad_result")
        if depth > DEEPEST:
            raise ToolError(f"the tool's result is nested over {DEEPEST} levels deep", "bad_result")
        inner = _inner(part)
        parts += len(inner)
        if parts > MOST_PARTS:
            raise ToolError(f"the tool's result has over {MOST_PARTS:,} values", "bad_result")
        rest += [(one, depth + 1) for one in inner if type(one) not in _PLAIN]


def _inner(part: Any) -> Collection[Any]:
    """Values in a value that have a JSON form of their own."""
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, list | tuple | set | frozenset):
        return part
    if isinstance(part, BaseModel) or (
        dataclasses.is_dataclass(part) and not isinstance(part, type)
    ):
        return vars(part).values() if hasattr(part, "__dict__") else ()
    return ()


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
