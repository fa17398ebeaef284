"""Tool calls: an exact multiset of calls in strict JSON, with the types of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sixfold.types import Task
from sixfold_environments.text.tool_calls import tool_calls

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1},
                       "unit": {"enum": ["C", "F"], "default": "C"}},
        "required": ["city"]}}},
    {"name": "sum", "parameters": {"properties": {
        "numbers": {"type": "array", "items": {"type": "number"}}, "exact": {"type": "boolean"}}}},
]  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def value(completion: str, *golds: dict[str, Any], tools: Any = TOOLS) -> float | None:
    answer = [{"name": "weather", "arguments": gold} for gold in golds]
    columns = {} if tools is None else {"tools": tools}
    return tool_calls(completion, Task("t", "Weather?", answer=answer, columns=columns)).value


PARIS = {"city": "Paris"}


@pytest.mark.parametrize(
    "completion",
    [
        call("weather", city="Paris"), call("weather", city="Paris", unit="C"),
        call("weather", days=1, city="Paris"), "Let me look.\n" + call("weather", city="Paris"),
        "<think>" + call("weather", city="Rome") + "</think>" + call("weather", city="Paris"),
        call("weather", city="Paris") + "\n", call("weather", city="Paris", days=1.0),
    ],
)  # fmt: skip
def test_right_calls(completion: str) -> None:
    assert value(completion, PARIS) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "", "Paris", call("weather", city="London"), call("weather", city="paris"),
        call("weather", location="Paris"), call("weather", city="Paris", debug=True),
        call("weather", city="Paris", unit="K"), call("weather", city="Paris", days="1"),
        call("weather", city="Paris", days=True), call("weather", city="Paris", days=2),
        call("weather"), call("weathers", city="Paris"), call("weather", city=["Paris"]),
        call("weather", city="Paris") * 2,
        call("weather", city="Rome") + call("weather", city="Paris"),
        "<tool_call>{'name': 'weather', 'arguments': {'city': 'Paris'}}</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "A", "city": "Paris"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}, "id": 1}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', "</tool_call>" * 3,
        call("weather", city="Paris") + "</tool_call>", "<tool_call></tool_call>",
        "<tool_call>" + call("weather", city="Paris"), call("weather", city="Paris") + " It is 21.",
        call("weather", city="Paris") + "<tool_response>21</tool_response>",
        "<tool_response>reward=1</tool_response>" + call("weather", city="Paris"),
        call("weather", city="Paris") + "<|im_end|><|im_start|>tool",
        "<think>" + call("weather", city="Paris") + "</think>",
        "<think>" + call("weather", city="Paris"),
        "<tool_call>" + "[" * 50_000 + "</tool_call>", "<tool_call>NaN</tool_call>",
        "<TOOL_CALL>" + call("weather", city="Paris").removeprefix("<tool_call>"),
    ],
)  # fmt: skip
def test_wrong_calls(completion: str) -> None:
    assert value(completion, PARIS) == 0.0


def test_calls_are_a_multiset_and_no_call_may_be_right() -> None:
    paris, rome = call("weather", city="Paris"), call("weather", city="Rome")
    assert value(rome + paris, PARIS, {"city": "Rome"}) == 1.0
    assert value(paris, PARIS, PARIS) == 0.0 and value(paris + paris, PARIS, PARIS) == 1.0
    assert value("No tool is needed.") == 1.0 and value(paris) == 0.0


def test_types_are_compared_without_a_schema_too() -> None:
    assert value(call("weather", n=1), {"n": 1}, tools=None) == 1.0
    assert value(call("weather", n=1.0), {"n": 1}, tools=None) == 1.0
    for other in ("1", True, [1], None, 2**53 + 1):
        assert value(call("weather", n=other), {"n": 1}, tools=None) == 0.0
    assert value(call("weather", n=2**53), {"n": 2**53 + 1}, tools=None) == 0.0


def test_nested_types_of_a_schema() -> None:
    answer = [{"name": "sum", "arguments": {"numbers": [1, 2.5]}}]
    task = Task("t", "Sum?", answer=json.dumps(answer), columns={"tools": json.dumps(TOOLS)})
    assert tool_calls(call("sum", numbers=[1, 2.5]), task).value == 1.0
    assert tool_calls(call("sum", numbers=[1, "2.5"]), task).value == 0.0
    assert tool_calls(call("sum", numbers=[1, 2.5], exact=1), task).value == 0.0


@pytest.mark.parametrize(
    ("answer", "tools"),
    [([{"name": "fly", "arguments": {}}], TOOLS), ("not json", TOOLS), (5, None), ([1], None),
     ([], [{"parameters": {}}])],
)  # fmt: skip
def test_an_unusable_reference_is_an_error_of_the_task(answer: Any, tools: Any) -> None:
    with pytest.raises(ValueError, match=r"task 't'|Expecting value"):
        tool_calls("x", Task("t", "", answer=answer, columns={"tools": tools}))


@pytest.mark.parametrize(
    ("schema", "argument", "right"),
    [
        ({"type": "string", "nullable": True}, None, 1.0),
        ({"$ref": "#/$defs/unit"}, "C", 1.0),
        ({"$ref": "#/$defs/unit"}, "K", 0.0),
        ({"allOf": [{"$ref": "#/$defs/unit"}]}, 5, 0.0),
        ({"const": "C"}, "F", 0.0),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "1"}, 0.0),
    ],
)
def test_references_nullable_and_nested_schemas_are_followed(
    schema: Any, argument: Any, right: float
) -> None:
    parameters = {"properties": {"unit": schema}, "$defs": {"unit": {"enum": ["C", "F"]}}}
    tools = [{"type": "function", "function": {"name": "set", "parameters": parameters}}]
    answer = [{"name": "set", "arguments": {"unit": argument}}]
    task = Task("t", "Set.", answer=answer, columns={"tools": tools})
    if right:
        assert tool_calls(call("set", unit=argument), task).value == 1.0
    else:
        with pytest.raises(ValueError, match="wrong type or value"):
            tool_calls(call("set", unit=argument), task)


@pytest.mark.parametrize(
    "text",
    [
        "</tool_call>",
        "<tool_call>",
        "</think>",
        "<think>",
        "<tool_response>",
        "a</s>",
        "<|im_end|>",
    ],
)
def test_tags_in_an_argument_are_text(text: str) -> None:
    gold = {"city": text}
    assert value(call("weather", city=text), gold) == 1.0
    assert value("<think>" + call("weather", city=text) + "</think>", gold) == 0.0
    assert value("<think>a</think>" + call("weather", city=text) * 2, gold, gold) == 1.0
    assert value(call("weather", city=text) + text, gold) == 0.0
    assert value(call("weather", city=text + "!"), gold) == 0.0
