"""Tool calls in the format of every model family: what the template writes is read back."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.models.families import TEMPLATES
from transformers import PreTrainedTokenizerFast

from sixfold.errors import UserError
from sixfold.model.chat_template import render
from sixfold.model.scratch import TOOL_TEMPLATE, character_tokenizer
from sixfold.renderer.call_formats import FORMATS, HERMES, find_format
from sixfold.renderer.renderer import Renderer
from sixfold.renderer.think import continued_block, opened_block, placeholder_turn
from sixfold.renderer.tool_calls import CallFormat, ReadReply, read_reply
from sixfold.types import ToolCall

BY_NAME = {one.name: one for one in FORMATS}
QUESTION = {"role": "user", "content": "0481926375"}

FAMILIES = {  # template: format, and the token that ends a turn
    "qwen2.5": ("Hermes", "<|im_end|>"),
    "qwen3": ("Hermes", "<|im_end|>"),
    "qwen3-thinking": ("Hermes", "<|im_end|>"),
    "qwen3-coder": ("Qwen3-Coder", "<|im_end|>"),
    "seed-oss": ("Seed", "<seed:eos>"),
    "llama3.2": ("Llama", "<|eot_id|>"),
    "mistral": ("Mistral", "</s>"),
    "deepseek-v3": ("DeepSeek", "<｜end▁of▁sentence｜>"),
    "mistral-v11": ("Mistral", "</s>"),
    "deepseek-v3.1": ("DeepSeek", "<｜end▁of▁sentence｜>"),
    "deepseek-v3.2": ("DeepSeek-V3.2", "<｜end▁of▁sentence｜>"),
    "glm-4.5": ("GLM", ""),
    "kimi-k2": ("Kimi-K2", "<|im_end|>"),
    "minimax-m2": ("MiniMax-M2", "[e~["),
    "phi4-mini": ("Phi-4", "<|end|>"),
    "granite": ("Granite", "<|end_of_text|>"),
    "function-gemma": ("FunctionGemma", "<end_of_turn>"),
    "gemma4": ("Gemma-4", "<turn|>"),
    "gpt-oss": ("gpt-oss", "<|call|>"),
    "hermes-3-tool-use": ("Hermes", "<|im_end|>"),
    "command-r-plus-tool-use": ("Command-R", "<|END_OF_TURN_TOKEN|>"),
    "scratch": ("Hermes", "<|end|>"),
}
NOT_RENDERED = {"granite": "<|tool_call|>{}"}
"""Templates that do not render earlier calls, as Granite 3.3: what their models write."""
ONE_CALL = {"llama3.2", "gpt-oss"}
"""Templates that write one call per reply."""
TEXT_ARGUMENTS = {"deepseek-v3", "deepseek-v3.1"}
"""Templates that take arguments as text."""


def template(name: str) -> str:
    return TOOL_TEMPLATE if name == "scratch" else (TEMPLATES / f"{name}.jinja").read_text()


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    made = character_tokenizer("ab", ("ab",))
    made.chat_template = template(name)
    if name != "scratch":
        made.eos_token, made.bos_token = FAMILIES[name][1] or "<s>", "<s>"
    return made


def written(name: str, content: str, calls: list[ToolCall], tools: list[Any]) -> str:
    """The reply as the family's model samples it: the turn that the template writes."""
    if name in NOT_RENDERED:
        listed = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in calls]
        return content + NOT_RENDERED[name].format(json.dumps(listed))
    text = name in TEXT_ARGUMENTS
    made = [
        {
            "id": f"functions.{call.name}:{n}" if name == "kimi-k2" else f"call0000{n}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.arguments if text else json.loads(call.arguments),
            },
        }
        for n, call in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    prompt = render(tokenizer(name), [QUESTION], tools=tools)
    whole = render(tokenizer(name), [QUESTION, turn], tools=tools, generation=False)
    if not whole.startswith(prompt):  # Command R+ ends the prompt with an instruction
        assert name == "command-r-plus-tool-use"
        whole = whole.rpartition(QUESTION["content"])[2].partition("<|CHATBOT_TOKEN|>")[2]
        return whole.partition("<|START_OF_TURN_TOKEN|>")[0]
    end, text = FAMILIES[name][1], whole[len(prompt) :]
    return text.rpartition(end)[0] if end else text


def read(name: str, text: str, tools: list[Any], opened: str = "") -> ReadReply:
    return read_reply(BY_NAME[FAMILIES[name][0]].parser(tools, opened), text)


def made_tool(call: ToolCall) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    properties = {
        key: {"type": "null" if value is None else kinds.get(type(value), "object")}
        for key, value in json.loads(call.arguments).items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": call.name, "description": "d", "parameters": parameters},
    }


def same(found: tuple[ToolCall, ...], calls: list[ToolCall]) -> bool:
    return [(c.name, json.loads(c.arguments)) for c in found] == [
        (c.name, json.loads(c.arguments)) for c in calls
    ]


WORDS = st.text("abcdefgh_", min_size=1, max_size=6)
MARKS = st.sampled_from(
    (
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|call|>"),
        *("<|end|>", "<｜tool▁call▁end｜>", "<|tool_call_end|>", "</arg_value", "</function>"),
        *('"', "\\", "}", "]", "\n", "\u00e9", "\U0001f600", " "),
    )
)
TEXTS = st.lists(MARKS | WORDS, max_size=4).map("".join)
LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.just(0.5) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    lambda name, arguments: ToolCall(name, json.dumps(arguments, ensure_ascii=False)),
    st.text("abcxyz_019", min_size=1, max_size=8).map("f".__add__),
    st.dictionaries(WORDS, VALUES, max_size=3),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_from_the_template(name: str) -> None:
    found = find_format(tokenizer(name))
    assert found is not None and found.name == FAMILIES[name][0]
    assert same(read(name, written(name, "", [CALL], [TOOL]), [TOOL]).calls, [CALL])


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_a_template_that_only_mentions_the_marks_of_a_format_has_that_format(
    one: CallFormat,
) -> None:
    """Granite 3.3 and Phi-4-mini share a mark, as do Hermes, Qwen3-Coder and GLM."""
    made = character_tokenizer("ab", ("ab",))
    marks = " ".join(one.evidence)
    made.chat_template = "{{ messages[0].content }}{% if tools %}" + repr(marks) + "{% endif %}"
    assert find_format(made) is one
    others = [other for other in FORMATS if other is not one]
    assert all(set(other.evidence) != set(one.evidence) for other in others)


def test_a_template_that_writes_calls_in_another_format_has_no_known_one() -> None:
    """Functionary 3.1 mentions the mark of Llama, and writes calls that Llama's parser drops."""
    made = character_tokenizer("ab", ("ab",))
    made.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<function="
        "{{ c.function.name }}>{{ c.function.arguments | tojson }}</function>{% endfor %}"
        "{% endfor %}{{ '<|python_tag|>' if tools }}"
    )
    assert find_format(made) is None


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(CALLS, min_size=1, max_size=2, unique_by=lambda call: call.name), st.data())
@settings(deadline=None, max_examples=25)
def test_a_call_that_the_template_writes_is_read_back(
    name: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    calls = calls[:1] if name in ONE_CALL else calls
    tools = [made_tool(call) for call in calls]
    text = written(name, "", calls, tools)
    opened = opened_block(render(tokenizer(name), [QUESTION], tools=tools))
    found = read(name, text, tools, opened)
    assert same(found.calls, calls) and not found.malformed
    assert not re.sub(r"<think>|</think>", "", found.content).strip()
    parser = BY_NAME[FAMILIES[name][0]].parser(tools, opened)
    step = data.draw(st.integers(1, 40))
    pieces = [p for at in range(0, len(text), step) for p in parser.push(text[at : at + step])]
    streamed = [*pieces, *parser.finish()]
    assert tuple(p for p in streamed if isinstance(p, ToolCall)) == found.calls


CALL = ToolCall("add", '{"a": 1, "b": "x"}')
TOOL = made_tool(CALL)
SEVERAL = [name for name in FAMILIES if name not in ("llama3.2", "gpt-oss")]
"""Families whose calls have a mark of their own."""


@pytest.mark.parametrize("name", SEVERAL)
def test_text_before_and_after_a_call_is_kept(name: str) -> None:
    text = written(name, "", [CALL], [TOOL]).strip().rpartition("</think>")[2]
    after = "" if name in ("mistral-v11",) else " and more"
    found = read(name, f"I call. {text}{after}", [TOOL])
    assert same(found.calls, [CALL]) and not found.malformed
    assert found.content == f"I call.{after}"


@pytest.mark.parametrize("name", SEVERAL)
def test_a_call_inside_a_thought_is_text(name: str) -> None:
    text = written(name, "", [CALL], [TOOL]).strip().rpartition("</think>")[2]
    thought = f"<think>\nI could {text}\n</think>\n\n"
    assert read(name, thought + "no", [TOOL]).calls == ()
    assert read(name, thought + "no", [TOOL]).content == thought + "no"
    assert same(read(name, thought + text, [TOOL]).calls, [CALL])
    rest = thought.removeprefix("<think>\n")
    assert read(name, rest, [TOOL], opened="<think>\n").calls == ()
    assert read(name, f"<think>\n{text}", [TOOL]).calls == (), "the thought has not ended"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])
def test_a_truncated_call_is_malformed_and_stays_text(name: str) -> None:
    text = written(name, "", [CALL], [TOOL]).strip().rpartition("</think>")[2]
    cut = text[: text.index("add") + 3]
    found = read(name, cut, [TOOL])
    assert not found.calls and len(found.malformed) == 1
    if "section" not in cut and "calls▁begin" not in cut:  # marks around all calls are dropped
        assert found.content == cut


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        ("<tool_call>{oops}</tool_call>" + (good := '<tool_call>{"name": "f"}</tool_call>'), 1, 1),
        ('<tool_call>{"name": "f"} ' + good, 1, 1),  # the first is not closed
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>' + good, 1, 1),
        ('<tool_call>{"name": "f", "name": "g"}</tool_call>', 0, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', 0, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', 0, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', 0, 1),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', 0, 1),
        ('<tool_call>{"name": ""}</tool_call>', 0, 1),
        ('<tool_call>{"name": "f"} then</tool_call>', 0, 1),
        ("<tool_call></tool_call>", 0, 1),
        ('{"name": "f"}', 0, 0),
        ("</tool_call> <tool_cal", 0, 0),
    ],
)
def test_malformed_calls_of_hermes_are_counted(text: str, calls: int, malformed: int) -> None:
    found = read_reply(HERMES.parser(), text)
    assert (len(found.calls), len(found.malformed)) == (calls, malformed)
    assert all("\n" not in reason for reason in found.malformed)


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "content"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', 1, 0, ""),
        ('<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g"}', 2, 0, ""),
        ('{"answer": 3}', 0, 0, '{"answer": 3}'),  # an answer that is JSON
        ('{"name": "f", "parameters": {', 0, 1, '{"name": "f", "parameters": {'),
        ('The answer is {"name": "f"}', 0, 0, 'The answer is {"name": "f"}'),
    ],
)
def test_calls_of_llama_are_whole_replies(
    text: str, calls: int, malformed: int, content: str
) -> None:
    found = read_reply(BY_NAME["Llama"].parser(), text)
    assert (len(found.calls), len(found.malformed), found.content) == (calls, malformed, content)


def test_calls_of_gpt_oss_between_other_messages() -> None:
    """Both places of the recipient in a header; thoughts and answers stay as they are."""
    thought = "<|channel|>analysis<|message|>to=functions.add {}<|end|>"
    first = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    second = (
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": "<|end|>"}'
    )
    parser = BY_NAME["gpt-oss"].parser()
    found = read_reply(parser, f"{thought}{first}<|call|>{second}")
    assert found.content == thought and not found.malformed
    assert [json.loads(call.arguments) for call in found.calls] == [{"a": 1}, {"a": "<|end|>"}]
    final = "<|channel|>final<|message|>42"
    assert read_reply(BY_NAME["gpt-oss"].parser(), thought + final).content == thought + final


def test_numbers_too_large_for_a_float_give_no_invalid_arguments() -> None:
    gemma = BY_NAME["FunctionGemma"].parser()
    found = read_reply(gemma, "<start_function_call>call:f{a:1e999}<end_function_call>")
    assert not found.calls and "1e999 is too large" in found.malformed[0]
    text = "<tool_call><function=f><parameter=a>1e999</parameter></function></tool_call>"
    (call,) = read_reply(BY_NAME["Qwen3-Coder"].parser(), text).calls
    assert json.loads(call.arguments) == {"a": "1e999"}


def test_values_of_tagged_calls_have_the_type_of_the_schema() -> None:
    properties = {
        "count": {"type": "integer"},
        "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "name": {"type": "string"},
        "kind": {"enum": ["1", "2"]},
    }
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    values = {"count": "3", "on": "True", "name": "3", "kind": "1", "free": "[1]", "bad": "[1"}
    tags = "".join(f"<parameter={key}>\n{v}\n</parameter>\n" for key, v in values.items())
    text = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    (call,) = read_reply(BY_NAME["Qwen3-Coder"].parser([tool]), text).calls
    assert json.loads(call.arguments) == {
        "count": 3, "on": True, "name": "3", "kind": "1", "free": [1], "bad": "[1",
    }  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_calls_and_thoughts_inside_a_json_answer_are_text(name: str, step: int) -> None:
    call = written(name, "", [CALL], [TOOL]).strip().rpartition("</think>")[2]
    answer = json.dumps({"a": [f'"{call}" <think> </think> [THINK]'], "b": 1}, ensure_ascii=False)
    for before in ("", "<think>\nhm\n</think>\n"):
        for text, content, calls in (
            (f"{before}{answer}", f"{before}{answer}", []),
            (f"{before}{answer} {call}", f"{before}{answer}", [CALL]),
            (f'{before}[He said "hi {call}', f'{before}[He said "hi', [CALL]),
        ):
            parser = BY_NAME[FAMILIES[name][0]].parser([TOOL])
            parts = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
            pieces = [piece for part in [*parts, parser.finish()] for piece in part]
            found = "".join(piece for piece in pieces if isinstance(piece, str))
            assert found == content and not parser.malformed
            assert same(tuple(p for p in pieces if isinstance(p, ToolCall)), calls)


def test_a_tag_in_a_json_answer_closes_no_thought() -> None:
    answer = '{"a": "</think>"}'
    assert continued_block("<think>\n", answer) == f"\n</think>\n\n{answer}"
    assert placeholder_turn("<think>\n", answer, "1", "2") == "<think>\n2"
    assert placeholder_turn("<think>\n", f"a</think>{answer}", "1", "2").count("</think>") == 1


KINDS = {
    "string": TEXTS
    | st.sampled_from(["12345", "007", "1e5", "-0.5", "True", "false", '"a"', "a b"]),
    "integer": st.integers(-(10**9), 10**9),
    "number": st.just(0.5) | st.integers(-9, 9),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers(0, 9) | TEXTS, max_size=3),
    "object": st.dictionaries(WORDS, st.booleans() | TEXTS, max_size=2),
}
ALONE = ("string", "string null", "string array", "string object null")
"""Kinds of values of which a text can be told apart: a text of digits is no array."""
MIXED = ("integer", "integer null", "number boolean", "array null", "object array", "boolean null")


@st.composite
def arguments_with_schemas(draw: st.DrawFn) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A value, a schema that allows it, in one of the ways to write it, and its definitions."""
    kinds = draw(st.sampled_from(ALONE + MIXED)).split()
    kind = draw(st.sampled_from(kinds))
    value = draw(KINDS[kind])
    if kind == "string":
        marks = {"null": ("null", "None"), "array": ("[",), "object": ("{",)}
        assume(not any(value.strip().startswith(marks.get(other, ())) for other in kinds))
    types = [{"type": one} for one in kinds]
    if kinds[-1] == "null" and draw(st.booleans()):
        types, first = [{**one, "nullable": True} for one in types[:-1]], kinds[0]
        types[0] = {"type": first, "nullable": True}
    union = {draw(st.sampled_from(["anyOf", "oneOf"])): types}
    forms: list[tuple[Any, Any]] = [
        (union, {}),
        ({"type": kinds}, {}),
        ({"$ref": "#/$defs/one"}, {"one": union}),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}, {"description": "d"}]}, {"a/b": union}),
        ({"anyOf": [{"$ref": "#/$defs/one"}, {"const": "other 5192"}]}, {"one": union}),
        ({"enum": [value, "other 5192", 7]} if value not in ("7",) else union, {}),
    ]
    return (value, *draw(st.sampled_from(forms)))


TAGGED = ("qwen3-coder", "seed-oss", "glm-4.5", "minimax-m2", "deepseek-v3.2")


@pytest.mark.parametrize("name", TAGGED)
@given(arguments_with_schemas())
@settings(deadline=None, max_examples=60)
def test_arguments_in_tags_are_read_by_their_schema(
    name: str, drawn: tuple[Any, dict[str, Any], dict[str, Any]]
) -> None:
    """Texts that look like numbers, words of Python and JSON, and nested values, in every form of
    schema: what the template writes is read back with its type.
    """
    value, schema, definitions = drawn
    call = ToolCall("f", json.dumps({"a": value}, ensure_ascii=False))
    tool = made_tool(call)
    tool["function"]["parameters"]["properties"]["a"] = schema
    tool["function"]["parameters"]["$defs"] = definitions
    text = written(name, "", [call], [tool])
    (found,) = read(name, text, [tool]).calls
    assert found == call


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "True", "True"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "STRING"}, "5", "5"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5.5", "5.5"),
        ({"$ref": "#/$defs/zip"}, "12345", "12345"),
        ({"allOf": [{"$ref": "#/$defs/zip"}]}, "12345", "12345"),
        ({"anyOf": [{"$ref": "#/$defs/numbers"}, {"type": "string"}]}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"$ref": "#/$defs/numbers"}, {"type": "string"}]}, '["1"]', '["1"]'),
        ({"const": "1"}, "1", "1"),
        ({"enum": ["1", "2"]}, '"1"', "1"),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": ["1", None]}, "None", None),
        ({"type": "boolean"}, " true ", True),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "object", "required": ["b"]}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[True, {'a': None}]", [True, {"a": None}]),
        ({"type": "array"}, "[(1, 2)]", "[(1, 2)]"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"type": "string"}, " null ", " null "),
        (True, "5", 5),
        ({}, "five", "five"),
    ],
)
def test_a_value_has_the_first_reading_that_its_schema_allows(
    schema: Any, text: str, value: Any
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {
            "zip": {"type": "string", "title": "Zip"},
            "numbers": {"type": "array", "items": {"type": "integer"}},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
        },
    }
    tool = {"function": {"name": "f", "parameters": parameters}}
    tags = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (call,) = read_reply(BY_NAME["GLM"].parser([tool]), tags).calls
    found = json.loads(call.arguments)["a"]
    assert (found, type(found)) == (value, type(value))


def test_arguments_are_found_in_every_part_of_a_schema() -> None:
    text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    for parameters in (
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": text}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": text}}]},
        {"anyOf": [{"properties": {"b": {}}}, {"properties": {"a": text}}]},
        {"type": "object", "additionalProperties": text},
    ):
        tool = {"function": {"name": "f", "parameters": parameters}}
        tags = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
        (call,) = read_reply(BY_NAME["Qwen3-Coder"].parser([tool]), tags).calls
        assert json.loads(call.arguments) == {"a": "5"}, parameters


def test_a_template_without_calls_has_no_format() -> None:
    made = character_tokenizer("ab")
    assert find_format(made) is None
    with pytest.raises(UserError, match=r"model\.chat_template.*Hermes.*model\.scratch\.words"):
        _ = Renderer(made).call_format
