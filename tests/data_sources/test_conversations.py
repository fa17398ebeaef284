"""Conversations of public datasets, in the forms of OpenAI, ShareGPT, TRL and Alpaca."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sixfold.data.conversations import Form, load_conversations
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig, SourceConfig
from sixfold.types import Task

TURNS = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "Yes."},
]
SHARED = [
    {"from": name, "value": turn["content"]}
    for name, turn in zip(("human", "gpt") * 2, TURNS, strict=True)
]
CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def write(path: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path / name)


def load(
    path: Path, *rows: dict[str, Any], form: Form = "auto", chat: bool = True, **data: Any
) -> TaskSet:
    settings = DataConfig(**{"source": write(path, *rows), "heldout": 0} | data)
    return load_conversations(settings, seed=0, form=form, chat=chat)


def only(tasks: TaskSet) -> Task:
    (task,) = tasks.train
    return task


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("messages", TURNS),
        ("messages", json.dumps(TURNS)),
        ("conversations", SHARED),
        ("dialogue", SHARED),
    ],
)
def test_a_conversation_keeps_all_of_its_turns(tmp_path: Path, column: str, value: Any) -> None:
    named = {"prompt_field": "dialogue"} if column == "dialogue" else {}
    task = only(load(tmp_path, {column: value, "id": "a"}, **named))
    assert (task.id, list(task.prompt), task.trace) == ("a", TURNS, None)


@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_a_mix_have_forms_of_their_own(tmp_path: Path, first: int) -> None:
    chat = {"prompt": TURNS[:3], "answer": "Yes.", "messages": TURNS}
    rows = [chat, {"prompt": "1+1?", "answer": "2", "messages": None}]
    made = load(tmp_path, *rows[first:], *rows[:first]).train
    assert [list(t.prompt) for t in made if not isinstance(t.prompt, str)] == [TURNS]
    assert [(t.prompt, t.trace) for t in made if isinstance(t.prompt, str)] == [("1+1?", "2")]


def test_calls_tools_and_variables_of_the_template(tmp_path: Path) -> None:
    shared = [
        {"from": "human", "value": "1+2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    row = {"conversations": shared, "tools": json.dumps([TOOL]), "system": "be good"}
    task = only(load(tmp_path, row | {"chat_template_kwargs": {"enable_thinking": False}}))
    assert list(task.prompt) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert task.tools == (TOOL,) and task.template_args == {"enable_thinking": False}


def test_of_two_lists_only_the_completion_is_trained(tmp_path: Path) -> None:
    task = only(load(tmp_path, {"prompt": TURNS[:3], "completion": TURNS[3:]}))
    weights = [message.get("weight") for message in task.prompt]
    assert weights == [None, 0, None, None]
    assert [m["content"] for m in task.prompt] == [m["content"] for m in TURNS]


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "1+2?", "completion": " 3"}, {}),
        ({"question": "1+2?", "answer": " 3"}, {}),
        (
            {"query": "1+2?", "response": " 3"},
            {"prompt_field": "query", "answer_field": "response"},
        ),
        ({"question": "1+2?", "answer": "0", "why": " 3"}, {"trace_field": "why"}),
        ({"instruction": "1+2?", "input": "", "output": " 3"}, {}),
    ],
)
def test_pairs_of_texts(tmp_path: Path, row: dict[str, Any], settings: dict[str, Any]) -> None:
    task = only(load(tmp_path, row, **settings))
    assert (task.prompt, task.trace) == ("1+2?", " 3")
    task = only(load(tmp_path, row, **settings, system_prompt="be good", prompt_suffix="!"))
    assert [m["content"] for m in task.prompt] == ["be good", "1+2?!"]


def test_alpaca_asks_a_chat_model_and_words_the_prompt_of_another(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert only(load(tmp_path, row)).prompt == "Add.\n\n1, 2"
    assert only(load(tmp_path, row, chat=False)).prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further"
        " context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:"
    )
    assert only(load(tmp_path, row | {"input": ""}, chat=False)).prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately"
        " completes the request.\n\n### Instruction:\nAdd.\n\n### Response:"
    )


def test_the_form_can_be_named(tmp_path: Path) -> None:
    row = {"messages": TURNS, "instruction": "Add 1 and 2.", "output": "3"}
    assert only(load(tmp_path, row)).prompt == tuple(TURNS)
    assert only(load(tmp_path, row, form="alpaca")).trace == "3"
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*'conversations'.*row keys:.*messages"):
        load(tmp_path, row, form="conversations")


def test_messages_after_the_last_trained_reply_are_read_by_no_reply(tmp_path: Path) -> None:
    assert only(load(tmp_path, {"messages": TURNS[:3]})).prompt == tuple(TURNS[:2])
    weighed = [*TURNS[:3], TURNS[3] | {"weight": 0}]
    assert only(load(tmp_path, {"messages": weighed})).prompt == tuple(TURNS[:2])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": TURNS[:1]}, "no reply"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, "weight 0"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "empty"),
        ({"conversations": [SHARED[0], {"from": "gpt", "value": None}]}, "empty"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"instruction": "a", "output": None}, "'output' is empty"),
    ],
)
def test_a_row_without_a_reply(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    whole = {"messages": TURNS, "conversations": SHARED, "prompt": "b", "completion": "c"}
    whole |= {"instruction": "b", "output": "c"}
    good = {name: whole[name] for name in row}
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{reason}.*data\.unanswered = 'drop'"):
        load(tmp_path, good, row)
    left = load(tmp_path, good, row, unanswered="drop")
    assert [task.id for task in left.train] == ["train-0"]
    (note,) = left.notes
    assert "1 of 2 rows" in note and reason in note
    with pytest.raises(UserError, match="0 usable rows"):
        load(tmp_path, row, unanswered="drop")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "hello"}, "'messages' must be a list of messages, got str"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": [TURNS[1]]}, "begins with a message of user"),
        ({"messages": [TURNS[0], TURNS[0], TURNS[1]]}, "roles must alternate"),
        ({"messages": [{"role": "robot", "content": "a"}, *TURNS]}, "unknown role 'robot'"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 2}]}, "weight of a message is 0"),
        ({"prompt": "a", "completion": [TURNS[1]]}, "'completion' must be text"),
        ({"prompt": [TURNS[0]], "completion": {"a": 1}}, "'completion' must be a list"),
        ({"prompt": " ", "completion": "a"}, "empty prompt"),
        ({"instruction": 3, "output": "a"}, "'instruction' must be text, got"),
        ({"messages": TURNS, "system": "a", "tools": "\ud800"}, "lone surrogate"),
        ({"text": "a"}, "no columns of a conversation"),
    ],
)
def test_a_row_of_another_form_names_file_and_line(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl:1\b.*{problem}"):
        load(tmp_path, row)


@pytest.mark.parametrize(
    "setting", [{"prefill": "<think>"}, {"prompt_suffix": "!"}, {"prompt_form": "rendered"}]
)
def test_settings_of_prompts_are_refused_for_conversations(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=rf"data\.{next(iter(setting))}.*rows\.jsonl:1"):
        load(tmp_path, {"messages": TURNS}, **setting)


def test_a_system_prompt_is_added_once(tmp_path: Path) -> None:
    task = only(load(tmp_path, {"messages": TURNS}, system_prompt="be good"))
    assert task.prompt[0] == {"role": "system", "content": "be good"}
    for row in ({"messages": [task.prompt[0], *TURNS]}, {"messages": TURNS, "system": "b"}):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: .*data\.system_prompt empty"):
            load(tmp_path, row, system_prompt="be good")
    own = {"messages": [task.prompt[0], *TURNS], "system": "be good"}
    assert only(load(tmp_path, own)) == task
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the column 'system' is not the system"):
        load(tmp_path, own | {"system": "b"})


@pytest.mark.parametrize("number", [42, 0.5, 0])
def test_a_completion_may_be_a_number(tmp_path: Path, number: float) -> None:
    assert only(load(tmp_path, {"prompt": "6*7?", "answer": number})).trace == str(number)


def test_parquet_rows_lose_the_fields_that_arrow_adds(tmp_path: Path) -> None:
    """A struct of Arrow has the fields of all calls: here `a` and `b`."""
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"b": 2}}]
    made = [{"type": "function", "function": call} for call in calls]
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": made}]
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), file)
    assert list(only(load(tmp_path, source=str(file))).prompt) == turns


def test_no_opening_is_trained_on_and_held_out(tmp_path: Path) -> None:
    """The held-out rows have other replies."""
    rows = [{"messages": [{"role": "user", "content": str(n)}, TURNS[1]]} for n in range(6)]
    other = [{"messages": [row["messages"][0], TURNS[3]]} for row in rows[:2]]
    held = write(tmp_path, *other, name="held.jsonl")
    tasks = load(tmp_path, *rows, heldout_split=held)
    assert [task.prompt[0]["content"] for task in tasks.train] == ["2", "3", "4", "5"]
    assert [task.prompt[0]["content"] for task in tasks.heldout] == ["0", "1"]
    assert any("2 training rows dropped" in note for note in tasks.notes)


def test_several_sources_of_different_forms(tmp_path: Path) -> None:
    first = write(tmp_path, {"messages": TURNS}, name="a.jsonl")
    second = write(tmp_path, {"instruction": "b", "output": "c"}, name="b.jsonl")
    data = DataConfig(
        sources=(
            SourceConfig(source=first, name="chat", weight=3.0),
            SourceConfig(source=second, name="alpaca"),
        ),
        heldout=0,
    )
    tasks = load_conversations(data, seed=0, form="auto", chat=True)
    assert [(task.id, task.source) for task in tasks.train] == [
        ("chat/train-0", "chat"),
        ("alpaca/train-0", "alpaca"),
    ]
    assert tasks.weights == {"chat": 3.0, "alpaca": 1.0}


@pytest.mark.parametrize("key", ["arguments", "parameters", "input"])
def test_the_arguments_of_a_call_have_one_of_three_names(tmp_path: Path, key: str) -> None:
    call = {"name": "add", key: {"a": 1}}
    turns = [SHARED[0], {"from": "function_call", "value": json.dumps(call)}]
    message = only(load(tmp_path, {"conversations": turns})).prompt[-1]
    assert message["tool_calls"] == [{"type": "function", "function": CALL}]  # type: ignore[index]


def test_arguments_of_another_name_are_refused(tmp_path: Path) -> None:
    turns = [SHARED[0], {"from": "function_call", "value": '{"name": "add", "kwargs": {"a": 1}}'}]
    with pytest.raises(UserError, match="a tool call has a name and an object of arguments"):
        load(tmp_path, {"conversations": turns})


def test_function_calls_of_2023_are_calls(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": "{}"}}
    told = {"role": "function", "name": "add", "content": "3"}
    task = only(load(tmp_path, {"messages": [TURNS[0], called, told, TURNS[1]]}))
    call, result = task.prompt[1], task.prompt[2]
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}  # type: ignore[index]
    assert "function_call" not in call and result["role"] == "tool"  # type: ignore[operator, index]


@pytest.mark.parametrize("text", ['[{"value": 3}]', "[{'value': 3}]", '[{"role": "chef"}]'])
def test_a_text_that_looks_like_messages_stays_text_where_messages_have_no_place(
    tmp_path: Path, text: str
) -> None:
    task = only(load(tmp_path, {"instruction": "sort", "input": text, "output": text}))
    assert (task.prompt, task.trace) == (f"sort\n\n{text}", text)
    assert only(load(tmp_path, {"prompt": "sort", "completion": text})).trace == text


def test_alpaca_rows_may_have_a_null_input_and_earlier_turns(tmp_path: Path) -> None:
    row = {"instruction": "sure?", "input": None, "output": "Yes."}
    assert only(load(tmp_path, row)).prompt == "sure?"
    after = only(load(tmp_path, {**row, "history": [["1+2?", "3"]]}))
    assert after.prompt == (TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:])
    with pytest.raises(UserError, match="'history' must be a list of pairs"):
        load(tmp_path, {**row, "history": ["1+2?"]})


def test_a_pair_may_have_a_system_message_or_a_text_after_messages(tmp_path: Path) -> None:
    asked = only(load(tmp_path, {"system": "Add.", "prompt": "1+2?", "completion": "3"}))
    assert asked.prompt == ({"role": "system", "content": "Add."}, TURNS[0]) and asked.trace == "3"
    mixed = only(load(tmp_path, {"prompt": TURNS[:1], "completion": "3"}))
    assert mixed.prompt == tuple(TURNS[:2])
