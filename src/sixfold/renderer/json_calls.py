"""Read calls that are written as JSON, as in most model families."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ..types import ToolCall
from .tool_calls import Tools, Unreadable

_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*[;,]?\s*(?=\{)")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*([\w\-]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_DEEPSEEK = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?([^\s<]+)(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{)"
)
_FENCE, _FENCE_END = re.compile(r"\s*```(?:json)?"), re.compile(r"\s*```")
_KIMI = re.compile(r"\s*((?:functions\.)?([\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")


def inside_json(block: str) -> bool:
    """True if the text, the first part of a block, ends inside a JSON string."""
    return _ESCAPED.sub("", block).count('"') % 2 == 1


def after_json(text: str) -> int:
    """Index after the JSON object or list that a text begins with. 0 if there is none."""
    if not text.lstrip().startswith(("{", "[")):
        return 0
    try:
        return decoded(text, 0)[1]
    except Unreadable:
        return 0


def read_json_call(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """One object with name and arguments, see `Read`."""
    value, end = decoded(text, 0)
    return [_call(value)], end


def read_json_calls(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """A list of objects, or objects one after the other, see `Read`."""
    value, end = decoded(text, 0)
    if isinstance(value, list):
        return [_call(entry) for entry in value], end
    calls = [_call(value)]
    while following := _SEPARATOR.match(text, end):
        value, end = decoded(text, following.end())
        calls.append(_call(value))
    return calls, end


def read_mistral(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """A JSON list, or in newer models a name before `[ARGS]` and an object, see `Read`."""
    named = _NAMED.match(text)
    if not named:
        return read_json_calls(text, tools)
    arguments, end = decoded(text, named.end())
    return [ToolCall(named[1], arguments_text(named[1], arguments), named[2] or "")], end


def read_deepseek(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """A name and an object. V3 and R1 write the object as a block of code, see `Read`."""
    head = _DEEPSEEK.match(text)
    if not head:
        raise Unreadable("it has no name, or no JSON object with the arguments after it")
    arguments, end = decoded(text, head.end())
    fence = _FENCE_END.match(text, end)
    return [ToolCall(head[1], arguments_text(head[1], arguments))], fence.end() if fence else end


def read_fenced(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """A JSON list in a block of code, see `Read`."""
    fence = _FENCE.match(text)
    if not fence:
        raise Unreadable("it is not a block of code")
    calls, end = read_json_calls(text[fence.end() :], tools)
    end += fence.end()
    closing = _FENCE_END.match(text, end)
    return calls, closing.end() if closing else end


def read_kimi(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """An id that contains the name, and an object, see `Read`."""
    head = _KIMI.match(text)
    if not head:
        raise Unreadable("it does not begin with functions.NAME:NUMBER")
    arguments, end = decoded(text, head.end())
    return [ToolCall(head[2], arguments_text(head[2], arguments), head[1])], end


def decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at an index of a text, and the index after it.

    Raises:
        Unreadable: there is no JSON value, a key is given twice, or a number is not finite.
    """
    start = _SPACE.match(text, at)
    assert start is not None
    try:
        return _DECODER.raw_decode(text, start.end())
    except Unreadable:
        raise
    except RecursionError as error:
        raise Unreadable("it is nested too deeply") from error
    except ValueError as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise Unreadable(f"it is not JSON: {problem}") from error


def arguments_text(name: str, arguments: Any) -> str:
    """Arguments as the text of a JSON object.

    Raises:
        Unreadable: they are not an object, or contain half of a surrogate pair.
    """
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name[:40]!r} are not a JSON object")
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("its text is not valid Unicode") from error
    return text


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise Unreadable("it is not a JSON object with name and arguments")
    name = _first(value, "name", "tool_name", default=None)
    if not isinstance(name, str) or not name:
        raise Unreadable("it has no name")
    arguments = _first(value, "arguments", "parameters", default={})
    given = _first(value, "id", "tool_call_id", default="")
    return ToolCall(name, arguments_text(name, arguments), given if isinstance(given, str) else "")


def _first(value: dict[str, Any], *keys: str, default: Any) -> Any:
    return next((value[key] for key in keys if key in value), default)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Unreadable(f"the key {twice[:40]!r} is given twice")
    return found


def finite(text: str) -> float:
    """The number that a text spells.

    Raises:
        Unreadable: it is too large for a float.
    """
    value = float(text)
    if math.isinf(value):
        raise Unreadable(f"the number {text[:40]} is too large")
    return value


def _not_finite(text: str) -> NoReturn:
    raise Unreadable(f"it is not JSON: {text} is not a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=finite, parse_constant=_not_finite
)
