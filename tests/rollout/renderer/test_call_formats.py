"""Tool calls in the format of every model family: what the template writes is read back."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.families import TEMPLATES
from transformers import PreTrainedTokenizerFast

from sixfold.errors import UserError
from sixfold.model.chat_template import render
from sixfold.model.scratch import TOOL_TEMPLATE, character_tokenizer
from sixfold.rollout.renderer.call_formats import FORMATS, HERMES, find_format
from sixfold.rollout.renderer.renderer import Renderer
from sixfold.rollout.renderer.think import opened_block
from sixfold.rollout.renderer.tool_calls import ReadReply, read_reply
from sixfold.types import ToolCall

BY_NAME = {one.name: one for one in FORMATS}
QUESTION = {"role": "user", "content": "0481926375"}

FAMILIES = {  # template: format, and the token that ends a turn
    "qwen2.5": ("Hermes", "<|im_end|>"),
    "qwen3": ("Hermes", "<|im_end|>"),
    "qwen3-thinking": ("Hermes", "<|im_end|>"),
    "qwen3-coder": ("Qwen3-Coder", "<|im_end|>"),
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
    "scratch": ("Hermes", "<|end|>"),
}
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
    assert whole.startswith(prompt)
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


def test_a_template_without_calls_has_no_format() -> None:
    made = character_tokenizer("ab")
    assert find_format(made) is None
    with pytest.raises(UserError, match=r"model\.chat_template.*Hermes.*model\.scratch\.words"):
        _ = Renderer(made).call_format
