"""Prompts of public datasets: conversations that end with an answer, tools, prefills, packed files.

Look-alikes with the traits of: ShareGPT and Hermes function calling (`conversations`, from/value,
function_call and observation), OpenAI and TRL (`messages`, `tools`, `chat_template_kwargs`,
tool_calls with arguments as JSON text), xLAM (a list of calls as answer), TriviaQA and Natural
Questions (a list of right answers), BoolQ (a truth value as answer), TinyZero (one message with the
rendered text), mini-R1 (a last message of the assistant).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sixfold.data.sources import load_tasks
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task
from sixfold_environments.audit.answers import answer_of
from sixfold_environments.text.short_answers import short_answer
from sixfold_environments.text.tool_calls import tool_calls

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
SHARED, SAID = (
    [(one, "1+2?"), (other, "It is 3.")] for one, other in (("human", "gpt"), ("user", "model"))
)
RENDERED = {"source": "a.jsonl", "prompt_form": "rendered"}
TURNS = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "It is 3."}]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def load(
    path: Path, *rows: dict[str, Any], rewards: tuple[str, ...] = ("my.py:reward",), **data: Any
) -> TaskSet:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(DataConfig(source=str(file), heldout=0, **data), seed=0, rewards=rewards)


def only(tasks: TaskSet) -> Task:
    (task,) = tasks.train
    return task


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("messages", TURNS),
        ("messages", json.dumps(TURNS)),
        ("conversations", [{"from": a, "value": b} for a, b in SHARED]),
        ("question", json.dumps([{"from": a, "value": b} for a, b in SAID])),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_that_ends_with_an_answer_is_prompt_and_reference(
    tmp_path: Path, column: str, value: Any, named: bool
) -> None:
    tasks = load(
        tmp_path,
        {column: value},
        rewards=("short_answer",),
        **({"prompt_field": column} if named else {}),
    )
    task = only(tasks)
    assert task.prompt == (turn("user", "1+2?"),)
    assert (task.answer, task.trace) == ("It is 3.", "It is 3.")
    assert any("1 of 1 conversations end with a reply" in note for note in tasks.notes)


def test_an_answer_column_stays_and_the_reply_is_the_worked_solution(tmp_path: Path) -> None:
    task = only(load(tmp_path, {"messages": TURNS, "answer": 3}, rewards=("math",)))
    assert (task.answer, task.trace) == (3, "It is 3.")
    marked = [TURNS[0], turn("assistant", "Adding gives\n#### 3")]
    task = only(load(tmp_path, {"messages": marked}, rewards=("math",), answer_after="####"))
    assert (task.answer, task.trace) == ("3", "Adding gives\n#### 3")


def test_rows_without_reply_or_answer_are_still_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:2: missing field 'answer'"):
        load(tmp_path, {"messages": TURNS}, {"messages": TURNS[:1]}, rewards=("math",))


def test_calls_and_their_results_stay_in_the_history(tmp_path: Path) -> None:
    calls = [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        }
    ]
    turns = [
        turn("user", "1+2?"),
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        turn("tool", "3", tool_call_id="c1"),
    ]
    read = {"id": "c1", "type": "function", "function": CALL}
    expected = (turns[0], turn("assistant", "", tool_calls=[read]), turns[2])
    assert only(load(tmp_path, {"messages": turns})).prompt == expected
    after = [*turns, turn("assistant", "3"), turn("user", "and 2+2?")]
    longer = only(load(tmp_path, {"messages": after}, prompt_suffix=" Say it."))
    assert longer.prompt == (*expected, after[3], turn("user", "and 2+2? Say it."))
    shared = [
        {"from": "human", "value": "1+2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "3"},
    ]
    without_id = turn("assistant", "", tool_calls=[{"type": "function", "function": CALL}])
    assert only(load(tmp_path, {"conversations": shared})).prompt == (
        turns[0],
        without_id,
        turn("tool", "3"),
    )


def test_a_last_call_is_the_reference_of_the_reward_tool_calls(tmp_path: Path) -> None:
    turns = [TURNS[0], {"role": "assistant", "tool_calls": [{"function": CALL}]}]
    task = only(load(tmp_path, {"messages": turns, "tools": [ADD]}, rewards=("tool_calls",)))
    assert task.answer == [CALL]
    said = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    assert tool_calls(said, task).value == 1 and tool_calls("3", task).value == 0


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ("short_answer", ["Paris", "Paris, France"]),
        ("short_answer", False),
        ("tool_calls", [CALL]),
        ("tool_calls", []),
        ("judge_reference", ["a", "b"]),
        ("math", True),
    ],
)
def test_lists_and_truth_values_are_answers(tmp_path: Path, reward: str, answer: Any) -> None:
    row = {"question": "?", "answer": answer}
    assert only(load(tmp_path, row, rewards=(reward,))).answer == answer


def test_every_right_answer_of_a_list_earns_full_marks(tmp_path: Path) -> None:
    row = {"question": "Capital?", "answer": ["Paris", "City of Light"]}
    task = only(load(tmp_path, row, rewards=("short_answer",)))
    said = [f"<answer>{text}</answer>" for text in ("paris", "City of Light", "Rome")]
    values = [short_answer(text, task).value for text in said]
    assert (values, answer_of(task)) == ([1, 1, 0], "Paris")
    no = only(load(tmp_path, {"question": "?", "answer": False}, rewards=("short_answer",)))
    assert short_answer("<answer>False</answer>", no).value == 1


@pytest.mark.parametrize(
    ("rewards", "answer", "message"),
    [
        (("short_answer", "math"), ["1"], r"'answer' must be text or a number, got list.*'math'"),
        (("short_answer",), [], "empty list"),
    ],
)
def test_lists_that_no_reward_can_read_are_refused(
    tmp_path: Path, rewards: tuple[str, ...], answer: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, {"question": "?", "answer": answer}, rewards=rewards)


def test_sft_does_not_imitate_how_python_prints_a_list(tmp_path: Path) -> None:
    task = only(load(tmp_path, {"question": "?", "answer": ["a", "b"]}))
    with pytest.raises(UserError, match=r"its answer is a list.*data\.trace_field"):
        _ = task.worked


@pytest.mark.parametrize("stored", ["list", "json", "bare", "parquet"])
def test_tools_and_template_variables_of_a_row_belong_to_its_prompt(
    tmp_path: Path, stored: str
) -> None:
    other = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    row: dict[str, Any] = {
        "question": "1+2?",
        "tools": {"json": json.dumps([ADD]), "bare": [ADD["function"]]}.get(stored, [ADD, other]),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if stored == "parquet":  # Arrow gives all objects of a column the same fields, and adds nulls
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        data = DataConfig(source=str(tmp_path / "a.parquet"), heldout=0)
        task = only(load_tasks(data, seed=0, rewards=("my.py:reward",)))
    else:
        task = only(load(tmp_path, row))
    assert task.tools == ((ADD, other) if stored in ("list", "parquet") else (ADD,))
    assert task.template_args == {"enable_thinking": False}
    plain = only(load(tmp_path, {"question": "1+2?"}))
    assert (plain.tools, plain.template_args) == ((), {}) and plain.prompt_key != task.prompt_key


def test_a_null_that_was_written_stays(tmp_path: Path) -> None:
    """In a file of JSON a null is a value; only Arrow's own are left out."""
    tool = {"type": "function", "function": {"name": "now", "parameters": {"default": None}}}
    calls = [{"type": "function", "function": {"name": "now", "arguments": {"zone": None}}}]
    turns = [TURNS[0], turn("assistant", "", tool_calls=calls), turn("tool", "9 h")]
    task = only(load(tmp_path, {"messages": turns, "tools": [tool]}))
    assert task.tools == (tool,) and task.prompt == tuple(turns)


def test_a_column_of_other_tools_is_noted_and_wrong_variables_are_refused(tmp_path: Path) -> None:
    tasks = load(tmp_path, {"question": "?", "tools": ["hammer"]})
    assert only(tasks).tools == () and any("'tools' of 1 rows" in note for note in tasks.notes)
    for value, message in (
        ({"tokenize": False}, "'tokenize'"),
        ("thinking", "invalid JSON"),
        ([1], "must be an object"),
    ):
        with pytest.raises(UserError, match=f"chat_template_kwargs.*{message}"):
            load(tmp_path, {"question": "?", "chat_template_kwargs": value})


def test_messages_as_python_prints_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:1.*as Python prints it.*json\.dumps"):
        load(tmp_path, {"question": str(TURNS)})
    listed = '["a", "b"] is a list'
    assert only(load(tmp_path, {"question": listed})).prompt == listed


def test_a_prefill_begins_every_reply(tmp_path: Path) -> None:
    begun = turn("assistant", "Let me think.\n<think>")
    for row in ({"question": "1+2?"}, {"question": TURNS[:1]}, {"question": TURNS}):
        task = only(load(tmp_path, row, prefill=begun["content"], system_prompt="Be brief."))
        assert task.prompt == (turn("system", "Be brief."), TURNS[0], begun)
        assert (task.form, task.prefill) == ("continued", begun["content"])
        assert task.prompt_text == "1+2?"
    made = load_tasks(DataConfig(prefill="<think>", heldout=2, limit=9), seed=0, rewards=())
    assert {task.prefill for task in (*made.train, *made.heldout)} == {"<think>"}


def test_a_last_message_of_the_assistant_is_continued_on_request(tmp_path: Path) -> None:
    task = only(load(tmp_path, {"messages": TURNS}, prompt_form="continued", prompt_suffix="!"))
    assert task.prompt == (turn("user", "1+2?!"), TURNS[1]) and task.prefill == "It is 3."
    assert (task.answer, task.trace) == (None, None)
    for row in ({"question": "1+2?"}, {"question": TURNS[:1]}):
        with pytest.raises(UserError, match=r"'continued'|list of messages"):
            load(tmp_path, row, prompt_form="continued")


def test_rendered_prompts_stay_as_they_are(tmp_path: Path) -> None:
    text = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n<think>"
    for value in (text, [turn("user", text)]):
        task = only(load(tmp_path, {"question": value, "tools": [ADD]}, prompt_form="rendered"))
        assert (task.prompt, task.form, task.tools) == (text, "rendered", ())
    with pytest.raises(UserError, match="'question' must be text"):
        load(tmp_path, {"question": TURNS}, prompt_form="rendered")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt_form": "rendered", "prefill": "x"}, "prefill"),
        ({"prompt_form": "rendered", "system_prompt": "x"}, "system_prompt"),
        ({"prompt_form": "continued", "prefill": "x"}, "prefill"),
        ({"sources": (RENDERED,), "prefill": "x"}, "prefill"),
    ],
)
def test_settings_that_such_prompts_cannot_have(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{named} has no effect"):
        DataConfig(**settings)


def test_a_limit_cuts_the_training_file_and_no_held_out_file(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = [{"question": f"{name} {n}", "answer": n} for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    for source, heldout in (
        (tmp_path / "train.jsonl", str(tmp_path / "test.jsonl")),
        (tmp_path / "train.parquet", str(tmp_path / "test.parquet")),
    ):
        data = DataConfig(source=str(source), heldout_split=heldout, limit=7)
        tasks = load_tasks(data, seed=0, rewards=("math",))
        assert (len(tasks.train), len(tasks.heldout)) == (7, 30)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.GZ"])
def test_packed_files_are_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(3)]
    tab = "\t" if "tsv" in suffix else ","
    text = {
        ".jsonl.gz": "".join(json.dumps(row) + "\n" for row in rows),
        ".json.gz": json.dumps(rows),
    }.get(suffix, "".join(f"{tab.join(line)}\n" for line in [rows[0], *(r.values() for r in rows)]))
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(gzip.compress(text.encode()))
    tasks = load_tasks(DataConfig(source=str(file), heldout=0), seed=0, rewards=("math",))
    assert [(task.prompt, task.answer) for task in tasks.train] == [
        (row["question"], row["answer"]) for row in rows
    ]
    for damaged in (file.read_bytes()[:-12], b"not packed at all"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"rows{suffix}"):
            load_tasks(DataConfig(source=str(file), heldout=0), seed=0, rewards=("math",))
