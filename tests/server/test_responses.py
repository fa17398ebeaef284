"""/v1/responses with the `openai` client: the same answers as a chat, complete and as events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Running

TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": False,
}


def greedy(server: Running, messages: list[Any], tokens: int) -> str:
    answer = server.client().chat.completions.create(
        model="tiny", messages=messages, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_a_text_is_answered_as_in_a_chat(server: Running) -> None:
    answer = server.client().responses.create(
        model="tiny", input="hi", instructions="be short", max_output_tokens=12, temperature=0
    )
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert answer.output_text == greedy(server, messages, 12)
    assert (
        answer.usage is not None
        and answer.usage.output_tokens == 12
        and answer.usage.total_tokens == 12 + answer.usage.input_tokens
    )
    assert (
        answer.status == "incomplete"
        and answer.incomplete_details is not None
        and answer.incomplete_details.reason == "max_output_tokens"
    )


@pytest.mark.slow
def test_an_answer_can_be_sent_back(server: Running) -> None:
    client = server.client()
    first = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "hi"}], max_output_tokens=8, temperature=0
    )
    said: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump() for item in first.output],
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": ""},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "4"}],
        },
    ]
    again = client.responses.create(
        model="tiny",
        input=said,
        max_output_tokens=8,
        temperature=0,
        tools=[TOOL],
        store=False,
        reasoning={"effort": "low"},
    )
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": a}}
        for i, a in ((1, ""), (2, '{"a": 1}'))
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
    ]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0,  # type: ignore[arg-type]
        tools=[{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
    )  # fmt: skip
    assert again.output_text == chat.choices[0].message.content


@pytest.mark.slow
def test_a_stream_adds_up_to_the_answer(server: Running) -> None:
    asked: dict[str, Any] = dict(
        model="tiny",
        input="tell me more",
        max_output_tokens=15,
        temperature=0,
        include=["message.output_text.logprobs"],
    )
    whole = server.client().responses.create(**asked)
    events = list(server.client().responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    last = events[-1].response  # type: ignore[union-attr]
    assert last.output_text == whole.output_text and last.usage == whole.usage
    part: Any = whole.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) == 15 and all(p.logprob <= 0 for p in part.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_functions_and_json(server: Running, stream: bool) -> None:
    pytest.importorskip("llguidance")
    asked: dict[str, Any] = dict(
        model="tiny",
        input="add",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=150,
    )
    if stream:
        events = list(server.client().responses.create(**asked, stream=True))
        answer = events[-1].response  # type: ignore[union-attr]
        assert [e.delta for e in events if e.type == "response.function_call_arguments.delta"] == [
            i.arguments for i in answer.output
        ]
    else:
        answer = server.client().responses.create(**asked)
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)["a"]) == ("function_call", "add", 1)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert json.loads(
        server.client()
        .responses.create(model="tiny", input="x", text=form, max_output_tokens=90)
        .output_text
    )["a"] in (1, 2)
