"""Read calls in tags: the formats of Qwen3-Coder, GLM, MiniMax-M2 and DeepSeek-V3.2.

A text value has no quotes, so the type of a value follows from the tool's schema. A value may
contain closing tags. It ends at the closing tag that precedes the next element or the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...types import ToolCall
from .json_calls import arguments_text, decoded
from .tool_calls import Tools, Unreadable

_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]+)>(?P<inner>.*?)</function>\s*(?=<function=|\Z)", re.DOTALL
)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*(?=<parameter=|\Z)",
    re.DOTALL,
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
_WORDS = {"True": True, "False": False, "None": None, "null": None}
"""Values as templates write them without `tojson`."""


def open_tags(*tags: str) -> Callable[[str], bool]:
    """Make a function that tells if the first part of a block ends inside an open element.

    Args:
        tags: names of the elements that count.
    """
    return lambda block: any(block.count(f"<{tag}") > block.count(f"</{tag}>") for tag in tags)


def read_functions_in_tags(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, see `Read`."""
    return _calls(text, tools, _FUNCTION, _PARAMETER)


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
        values = _arguments(found["inner"] or "", argument, _types(tools, name))
        calls.append(ToolCall(name, arguments_text(name, values)))
        at = found.end()
    if not calls:
        raise Unreadable("its tags are not those of a call")
    return calls, at


def _arguments(
    inner: str, argument: re.Pattern[str], types: Mapping[str, set[str]] | None
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    at = 0
    while found := argument.match(inner, at):
        key, plain = found["key"].strip(), found.groupdict().get("plain")
        if key in values:
            raise Unreadable(f"the argument {key[:40]!r} is given twice")
        known = {"string"} if plain == "true" else (types or {}).get(key, set())
        values[key] = _typed(found["value"], known)
        at = found.end()
    if inner[at:].strip():
        raise Unreadable("the tags of its arguments are not closed, or there is text between them")
    return values


def _typed(text: str, types: set[str]) -> Any:
    """The value of an argument: JSON if the text is JSON, or else the text itself.

    Args:
        text: the value as the model wrote it.
        types: JSON types that the schema allows. Empty if they are unknown. If the only type is
            "string", the text is not parsed.
    """
    if types == {"string"}:
        return text
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        value, end = decoded(word, 0)
    except Unreadable:
        return text
    return text if word[end:] or (isinstance(value, str) and "string" in types) else value


def _types(tools: Tools, name: str) -> dict[str, set[str]]:
    """JSON types of the parameters of a tool, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: _schema_types(schema) for key, schema in properties.items()}
    return {}


def _schema_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else set(given)
    for value in schema.get("enum", ()):
        types |= {"string"} if isinstance(value, str) else {"other"}
    for choice in ("anyOf", "oneOf"):
        for one in schema.get(choice, ()):
            types |= _schema_types(one)
    return types
