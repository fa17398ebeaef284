"""Read calls in tags: the formats of Qwen3-Coder, GLM, MiniMax-M2 and DeepSeek-V3.2.

A text value has no quotes, so the tool's schema decides whether `5` is a number or a text. A value
may contain closing tags. It ends at the closing tag that precedes the next element or the end.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from ..json_schema import argument_schema, fits
from ..types import ToolCall
from .json_calls import arguments_text, decoded
from .tool_calls import Tools, Unreadable

_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]+)>(?P<inner>.*?)</function>\s*(?=<function=|\Z)", re.DOTALL
)
_PARAMETER, _PARAMETER_IN_LINE = (
    re.compile(
        rf"\s*<parameter=(?P<key>[^>\n]+)>{line}(?P<value>.*?){line}</parameter>\s*"
        r"(?=<parameter=|\Z)",
        re.DOTALL,
    )
    for line in (r"\n?", "")
)
_INVOKE = re.compile(
    r"\s*<(?:｜DSML｜)?invoke name=\"(?P<name>[^\"\n]+)\">(?P<inner>.*?)</(?:｜DSML｜)?invoke>\s*"
    r"(?=<(?:｜DSML｜)?invoke |\Z)",
    re.DOTALL,
)
_INVOKE_PARAMETER = re.compile(
    r"\s*<(?:｜DSML｜)?parameter name=\"(?P<key>[^\"\n]+)\"(?: string=\"(?P<plain>true|false)\")?>"
    r"(?P<value>.*?)</(?:｜DSML｜)?parameter>\s*(?=<(?:｜DSML｜)?parameter |\Z)",
    re.DOTALL,
)
_PAIRS = re.compile(r"\s*(?P<name>[^<\n]+?)\s*(?P<inner><arg_key>.*)?\Z", re.DOTALL)
_PAIR = re.compile(
    r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*"
    r"(?=<arg_key>|\Z)",
    re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None}
"""Values as templates write them without `tojson`."""
MAX_LITERAL = 100_000
"""Maximum characters of a list or an object that is written as in Python."""


def open_tags(*tags: str) -> Callable[[str], bool]:
    """Make a function that tells if the first part of a block ends inside an open element.

    Args:
        tags: names of the elements that count.
    """
    return lambda block: any(block.count(f"<{tag}") > block.count(f"</{tag}>") for tag in tags)


def read_functions_in_tags(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, see `Read`."""
    return _calls(text, tools, _FUNCTION, _PARAMETER)


def read_functions_in_line(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """As `read_functions_in_tags`, but a value has no lines of its own, see `Read`."""
    return _calls(text, tools, _FUNCTION, _PARAMETER_IN_LINE)


def read_invokes(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, see `Read`."""
    return _calls(text, tools, _INVOKE, _INVOKE_PARAMETER)


def read_arg_pairs(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, see `Read`."""
    return _calls(text, tools, _PAIRS, _PAIR)


def _calls(
    text: str, tools: Tools, call: re.Pattern[str], argument: re.Pattern[str]
) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    at = 0
    while at < len(text) and (found := call.match(text, at)):
        name = found["name"].strip()
        values = _arguments(found["inner"] or "", argument, _parameters(tools, name))
        calls.append(ToolCall(name, arguments_text(name, values)))
        at = found.end()
    if not calls:
        raise Unreadable("its tags are not those of a call")
    return calls, at


def _arguments(inner: str, argument: re.Pattern[str], schema: Any) -> dict[str, Any]:
    """The arguments of a call."""
    values: dict[str, Any] = {}
    at = 0
    while found := argument.match(inner, at):
        key, plain = found["key"].strip(), found.groupdict().get("plain")
        if key in values:
            raise Unreadable(f"the argument {key[:40]!r} is given twice")
        if plain:  # the model itself says whether the value is a text
            part = {"type": "string"} if plain == "true" else {}
        else:
            part = argument_schema(schema, key)
        values[key] = _value(found["value"], part, schema)
        at = found.end()
    if inner[at:].strip():
        raise Unreadable("the tags of its arguments are not closed, or there is text between them")
    return values


def _value(text: str, part: Any, schema: Any) -> Any:
    """The value that a text stands for.

    A text may be read in several ways: as JSON, as Python writes it, as it is, and as a quoted
    text. The first reading that the schema allows is the value, or else the first one of an allowed
    type. If there is none, the text itself is the value, and the tool refuses it.

    Args:
        text: the value as the model wrote it.
        part: schema of the value.
        schema: schema of all arguments, in which references are looked up.
    """
    # White space belongs to a text, but is only written around other values.
    readings = _readings(text if fits(text, part, schema) else text.strip())
    readings.sort(key=lambda value: isinstance(value, str))
    for type_only in (False, True):
        for value in readings:
            if fits(value, part, schema, type_only=type_only):
                return value
    return text


def _readings(text: str) -> list[Any]:
    if text != text.strip():
        return [text]
    if text in _WORDS:
        return [_WORDS[text], text]
    try:
        value, end = decoded(text, 0)
        return [text] if text[end:] else [text, value]
    except Unreadable:
        return [text, *_literal(text)]


def _literal(text: str) -> list[Any]:
    """The list or object that a text writes as Python does. Empty if there is none."""
    if not text.startswith(("[", "{")) or len(text) > MAX_LITERAL:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes and numbers
            value = ast.literal_eval(text)
        if value == json.loads(json.dumps(value, allow_nan=False)):  # no set, and no keys but texts
            return [value]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    return []


def _parameters(tools: Tools, name: str) -> Any:
    """Schema of the arguments of a tool. {} if there is no such tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return function.get("parameters") or {}
    return {}
