"""Reward for tool calls: 1 if a completion makes exactly the calls of its task, otherwise 0.

A call is a block `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Calls are compared as
a multiset: their order does not matter, a repeated or additional call is wrong. Arguments keep
their JSON types; an argument that is left out has its default from the schema.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sixfold.environment.answer_part import answer_part, without_json
from sixfold.environment.grade import Grade, right_or_wrong
from sixfold.json_schema import fits, json_key
from sixfold.types import Task

from .formats import strict_json
from .marks import forged_turn

MAX_CALLS = 64
MAX_CHARACTERS = 200_000

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_RESPONSE = re.compile(
    r"<\s*/?\s*(?:tool_response|tool_result|tool_output|function_results?|observation)\b",
    re.IGNORECASE,
)


class BadCall(ValueError):
    """The text is not a call that a tool could run."""


def tool_calls(completion: str, task: Task) -> Grade:
    """1 if the calls of `completion` are those of `task.answer`, otherwise 0.

    `task.answer` is a list of {"name", "arguments"}, or its JSON text; an empty list means that no
    call is right. The column `tools` has the schemas, as OpenAI's API takes them; without it only
    the calls themselves are compared. Calls in thoughts do not count. A completion that writes the
    response of a tool, or goes on after its last call, is rejected.

    Raises:
        ValueError: if the answer or the schemas of the task cannot be read.
    """
    schemas = _schemas(task)
    try:
        wanted = [_with_defaults(_call(call), schemas) for call in _list_of_calls(task.answer)]
    except BadCall as error:
        raise ValueError(f"task {task.id!r}: its reference call is unusable: {error}") from error
    text = answer_part(completion)
    for problem in (forged_turn(without_json(completion)), _RESPONSE.search(without_json(text))):
        if problem:
            shown = problem if isinstance(problem, str) else problem[0]
            return Grade(0.0, "rejected", f"writes {shown}, which is not for the model to write")
    try:
        made = [_with_defaults(_call(strict_json(block)), schemas) for block in _blocks(text)]
    except BadCall as error:
        return Grade(0.0, "rejected", str(error))
    except ValueError as error:
        return Grade(0.0, "rejected", f"a call is not JSON: {error}")
    return right_or_wrong(Counter(map(json_key, made)) == Counter(map(json_key, wanted)))


def _blocks(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise BadCall(f"over {MAX_CHARACTERS} characters")
    seen = without_json(text)  # a text value may spell the tags
    blocks: list[str] = []
    at = seen.find(_OPEN)
    if _CLOSE in seen[: at if at >= 0 else None]:
        raise BadCall("a call ends that has not begun")
    while at >= 0:
        start = at + len(_OPEN)
        at = seen.find(_OPEN, start)
        block, closed, rest = seen[start : at if at >= 0 else None].partition(_CLOSE)
        if not closed or _CLOSE in rest:
            raise BadCall("a call is not closed, or closed twice")
        if rest.strip():
            raise BadCall("there is text after a call")
        blocks.append(text[start : start + len(block)])
        if len(blocks) > MAX_CALLS:
            raise BadCall(f"over {MAX_CALLS} calls")
    return blocks


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        raise BadCall("a call must have exactly the keys name and arguments")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise BadCall("the name of a call must be text, and its arguments an object")
    return name, arguments


def _with_defaults(
    call: tuple[str, dict[str, Any]], schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """The call with the defaults of its schema."""
    name, arguments = call
    if not schemas:
        return call
    if name not in schemas:
        raise BadCall(f"there is no tool {name[:40]!r}")
    schema = schemas[name]
    properties = schema.get("properties") or {}
    if unknown := sorted(set(arguments) - set(properties)):
        raise BadCall(f"{name} has no argument {unknown[0][:40]!r}")
    defaults = {
        key: one["default"]
        for key, one in properties.items()
        if isinstance(one, Mapping) and "default" in one
    }
    filled = {**defaults, **arguments}
    for required in schema.get("required") or ():
        if required not in filled:
            raise BadCall(f"{name} needs the argument {required!r}")
    for key, value in arguments.items():
        if not fits(value, properties[key], schema):
            raise BadCall(f"{name}: the argument {key!r} has the wrong type or value")
    return name, filled


def _list_of_calls(answer: Any) -> Sequence[Any]:
    found = strict_json(answer) if isinstance(answer, str) else answer
    if isinstance(found, Mapping):
        return [found]
    if not isinstance(found, list | tuple):
        raise BadCall("it must be a list of calls")
    return found


def _schemas(task: Task) -> dict[str, Mapping[str, Any]]:
    """Parameters of each tool by name, from the column `tools`."""
    tools = task.columns.get("tools")
    if isinstance(tools, str):
        tools = strict_json(tools)
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"task {task.id!r}: column tools must be a list of functions")
        found[function["name"]] = function.get("parameters") or {}
    return found
