"""Comparisons of public preference datasets: every form gives the same one, and bad rows are named.

The rows have the columns of UltraFeedback-binarized, HH, Tulu 3, Skywork, RewardBench 2 and others.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests.models.families import BY_NAME, make_tokenizer

from sixfold.data.comparisons import Comparison, load_comparisons
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import ComparisonsConfig, DataConfig, SourceConfig
from sixfold.renderer.renderer import Renderer
from sixfold.stages.dataset import sampled_row
from sixfold.stages.keepers import Keeper
from sixfold.stages.preference_examples import PreferenceExamples
from sixfold.types import Group, Task

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@cache
def renderer() -> Renderer:
    family = BY_NAME["qwen2.5-instruct"]
    tokenizer = make_tokenizer(family)
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(family.ends)))


def load(
    path: Path,
    *rows: dict[str, Any],
    chat: bool = True,
    preference: dict[str, Any] | None = None,
    margins: bool = False,
    **data: Any,
) -> TaskSet:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataConfig(**{"source": str(file), "heldout": 0} | data)
    config = ComparisonsConfig(**preference or {})
    return load_comparisons(settings, config, seed=0, chat=chat, margins=margins)


def only(found: TaskSet) -> Comparison:
    (task,) = found.train
    assert isinstance(task, Comparison)
    return task


def group(found: TaskSet) -> Group:
    examples = PreferenceExamples(
        found,
        renderer(),
        ComparisonsConfig(),
        examples_per_step=4,
        context=400,
        overlong="error",
        seed=0,
    )
    (made,) = examples.groups(1)
    return made


def expected(turns: list[dict[str, Any]], text: str) -> list[int]:
    """Tokens of a conversation, by the template alone."""
    tokenizer = renderer().tokenizer
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(f"{prompt}{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    return [int(token) for token in ids]


def ranked(made: Group) -> list[list[int]]:
    """Tokens of the completions with their prompts, the best first. No two are equally good."""
    rewards = {one.total_reward: one.tokens for one in made.trajectories}
    assert len(rewards) == len(made.trajectories)
    return [rewards[reward] for reward in sorted(rewards, reverse=True)]  # type: ignore[type-var]


ASK, GOOD, BAD = "1+1?", "It is 2.", "3"
ULTRAFEEDBACK = {
    "prompt": ASK,
    "prompt_id": "u1",
    "messages": [user(ASK), reply(GOOD)],
    "chosen": [user(ASK), reply(GOOD)],
    "rejected": [user(ASK), reply(BAD)],
    "score_chosen": 8.0,
    "score_rejected": 3.5,
}
SHARED = {
    "conversations": [{"from": "human", "value": ASK}],
    "chosen": {"from": "gpt", "value": GOOD},
    "rejected": {"from": "gpt", "value": BAD},
}
ONE_PAIR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UltraFeedback": (ULTRAFEEDBACK, {}),
    "Skywork": (
        {"chosen": [user(ASK), reply(GOOD)], "rejected": [user(ASK), reply(BAD)], "source": "m"},
        {},
    ),
    "the chosen conversation repeated": (
        {name: ULTRAFEEDBACK[name] for name in ("messages", "chosen", "rejected")},
        {},
    ),
    "HH": (
        {
            side: f"\n\nHuman: {ASK}\n\nAssistant: {text}"
            for side, text in (("chosen", GOOD), ("rejected", BAD))
        },
        {},
    ),
    "HH with a prompt": (
        {"prompt": f"\n\nHuman: {ASK}\n\nAssistant:", "chosen": GOOD, "rejected": BAD},
        {},
    ),
    "HH with a prompt, as TRL splits it": (
        {
            "prompt": f"\n\nHuman: {ASK}\n\nAssistant:",
            "chosen": f" {GOOD}",
            "rejected": f" {BAD}\n\nHuman: ",
        },
        {},
    ),
    "HH, cut after a marker": (
        {
            side: f"\n\nHuman: {ASK}\n\nAssistant: {text}\n\nHuman:"
            for side, text in (("chosen", GOOD), ("rejected", BAD))
        },
        {},
    ),
    "texts": ({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, {}),
    "TRL": ({"prompt": [user(ASK)], "chosen": [reply(GOOD)], "rejected": [reply(BAD)]}, {}),
    "a prompt of messages, and texts": (
        {"prompt": [user(ASK)], "chosen": GOOD, "rejected": BAD},
        {},
    ),
    "JSON text": (
        {"prompt": ASK, "chosen": json.dumps([reply(GOOD)]), "rejected": json.dumps([reply(BAD)])},
        {},
    ),
    "Orca": ({"system": "", "question": ASK, "chosen": GOOD, "rejected": BAD}, {}),
    "ShareGPT": (SHARED, {}),
    "named columns": (
        {"in": {"q": ASK}, "out": {"yes": GOOD, "no": BAD}},
        {"data.prompt_field": "in.q", "chosen_field": "out.yes", "rejected_field": "out.no"},
    ),
    "labelled A": ({"prompt": ASK, "completion_A": GOOD, "completion_B": BAD, "label": "A"}, {}),
    "labelled B": (
        {
            "prompt_conversation": [user(ASK)],
            "completion_A": [reply(BAD)],
            "completion_B": [reply(GOOD)],
            "label": "B",
        },
        {},
    ),
    "arena": (
        {
            "conversation_a": [user(ASK), reply(BAD)],
            "conversation_b": [user(ASK), reply(GOOD)],
            "winner": "model_b",
        },
        {},
    ),
    "labelled, named columns": (
        {"prompt": ASK, "left": BAD, "right": GOOD, "verdict": "b"},
        {
            "form": "labelled",
            "chosen_field": "left",
            "rejected_field": "right",
            "label_field": "verdict",
        },
    ),
    "NeMo": (
        {
            "context": [user(ASK)],
            "completions": [
                {"rank": 1, "completion": [reply(BAD)]},
                {"rank": 0, "completion": [reply(GOOD)]},
            ],
            "task_name": "t",
        },
        {},
    ),
    "UltraFeedback with scores": (
        {
            "instruction": ASK,
            "completions": [
                {"response": BAD, "overall_score": 3},
                {"response": GOOD, "overall_score": 8.5},
            ],
        },
        {"completion_field": "response", "score_field": "overall_score"},
    ),
    "scores beside the list": ({"prompt": ASK, "completions": [BAD, GOOD], "scores": [-1, 2]}, {}),
    "ranks beside the list": ({"prompt": ASK, "completions": [BAD, GOOD], "ranks": [2, 1]}, {}),
    "RewardBench 2": (
        {"prompt": ASK, "chosen": [GOOD], "rejected": [BAD], "num_correct": 1, "subset": "Math"},
        {},
    ),
    "best of two": ({"prompt": ASK, "completions": [GOOD, BAD], "num_correct": 1}, {}),
    "best of two, as CSV has it": (
        {"prompt": ASK, "completions": json.dumps([GOOD, BAD]), "num_correct": "1.0"},
        {},
    ),
    "scores, as CSV has them": (
        {"prompt": ASK, "completions": json.dumps([BAD, GOOD]), "scores": "[1, 2]"},
        {},
    ),
}


def split_settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of [preference], and of [data]."""
    data = {name.removeprefix("data."): v for name, v in given.items() if name.startswith("data.")}
    return {name: v for name, v in given.items() if not name.startswith("data.")}, data


@pytest.mark.parametrize("name", ONE_PAIR)
def test_every_form_gives_the_same_pair(tmp_path: Path, name: str) -> None:
    row, given = ONE_PAIR[name]
    preference, data = split_settings(given)
    made = group(load(tmp_path, row, preference=preference, **data))
    assert ranked(made) == [expected([user(ASK)], text) for text in (GOOD, BAD)]
    prompt = len(
        renderer().tokenizer.apply_chat_template([user(ASK)], add_generation_prompt=True)[
            "input_ids"
        ]
    )
    for one in made.trajectories:
        assert one.prompt_length == prompt
        assert one.sampled_length == len(one.tokens) - prompt
        assert (set(one.logp), set(one.version)) == ({0.0}, {-1})


def test_scored_completions_of_a_stage_make_one_comparison_for_each_task(tmp_path: Path) -> None:
    """Rows as a stage of kind sample writes them, in any order."""
    tasks = [Task(f"t{n}", f"{n}+1?") for n in range(3)]
    texts = [("2", "3", "4"), ("2", "1"), ("3", "4")]
    rewards = [(1.0, 0.0, 0.5), (0.0, 0.0), (0.0, 1.0)]
    rows = [
        sampled_row(Keeper(task, k, text, reward), model="m", seed=1)
        for k in range(3)
        for task, said, paid in zip(tasks, texts, rewards, strict=True)
        for text, reward in list(zip(said, paid, strict=True))[k : k + 1]
    ]
    settings = {"prompt_field": "prompt", "trace_field": "completion", "format": "rows"}
    found = load(tmp_path, *rows, **settings)
    assert {t.id: (t.completions, t.grades) for t in found.train} == {  # type: ignore[attr-defined]
        "t0": (texts[0], rewards[0]),
        "t2": (texts[2], rewards[2]),
    }
    assert any("1 comparisons are left out: no completion is better" in n for n in found.notes)
    extremes = load(tmp_path, *rows, preference={"pairs": "extremes"}, **settings)
    assert [t.completions for t in extremes.train] == [("2", "3"), ("3", "4")]  # type: ignore[attr-defined]


def test_sampled_completions_have_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    task = Task("t", ASK)
    end = renderer().turn_end_tokens
    drawn = [renderer().plain(text) + end for text in (" 2", "a  b.", "<b>\n\n3", "4\n")]
    rows = [
        sampled_row(Keeper(task, k, renderer().decode(tokens), float(k)), model="m", seed=1)
        for k, tokens in enumerate(drawn)
    ]
    made = group(load(tmp_path, *rows))
    assert [one.tokens for one in made.trajectories] == [
        renderer().encode(task) + tokens for tokens in drawn
    ]


def test_scored_completions_without_tasks_are_compared_by_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": p, "completion": c, "score": s} for p, c, s in (("a", "x", 1), ("b", "x", 0))
    ]
    more = [
        {"prompt": p, "completion": c, "score": s} for p, c, s in (("b", "y", 2), ("a", "z", 3))
    ]
    found = load(tmp_path, *rows, *more)
    assert [(t.id, t.completions, t.grades) for t in found.train] == [  # type: ignore[attr-defined]
        ("train-0", ("x", "z"), (1.0, 3.0)),
        ("train-1", ("x", "y"), (0.0, 2.0)),
    ]


def test_unpaired_labels(tmp_path: Path) -> None:
    rows = [
        {"prompt": ASK, "completion": text, "label": label}
        for text, label in (("a", True), ("b", False), ("c", "true"), ("d", 0), ("a", False))
    ]
    found = load(tmp_path, *rows)
    assert [task.grades for task in found.train] == [(1.0,), (0.0,), (1.0,), (0.0,), (0.0,)]  # type: ignore[attr-defined]
    assert len(group(load(tmp_path, rows[0])).trajectories) == 1


def test_ranked_lists_and_several_right_answers(tmp_path: Path) -> None:
    listed = {"prompt": ASK, "completions": [*"abcd"], "ranks": [2, 1, 1, 4]}
    assert only(load(tmp_path, listed)).grades == (-2.0, -1.0, -1.0, -4.0)
    extremes = only(load(tmp_path, listed, preference={"pairs": "extremes"}))
    assert (extremes.completions, extremes.grades) == (("b", "d"), (-1.0, -4.0))
    best = {"prompt": ASK, "completions": [*"abcd"], "num_correct": 2}
    assert only(load(tmp_path, best)).grades == (1.0, 1.0, 0.0, 0.0)
    sides = {"prompt": ASK, "chosen": ["a"], "rejected": ["b", "c", "d"]}
    assert only(load(tmp_path, sides)).grades == (1.0, 0.0, 0.0, 0.0)


def test_margins(tmp_path: Path) -> None:
    row = {"prompt": ASK, "chosen": "a", "rejected": "b"}
    assert only(load(tmp_path, row | {"margin": 2.5}, margins=True)).grades == (2.5, 0.0)
    assert only(load(tmp_path, row | {"margin": None})).grades == (1.0, 0.0)
    named = row | {"gap": "0.5"}, {"margin_field": "gap"}
    assert only(load(tmp_path, named[0], preference=named[1], margins=True)).grades == (0.5, 0.0)
    # Otherwise a loss of labels would take the margin for one.
    unread = load(tmp_path, named[0], preference=named[1])
    assert only(unread).grades == (1.0, 0.0) and "1 margins are not read" in unread.notes[0]


def test_a_margin_that_is_asked_for_is_in_every_row(tmp_path: Path) -> None:
    """A row without one had the margin 1, whatever those of the others are."""
    row = {"prompt": ASK, "chosen": "a", "rejected": "b"}
    rows = (row | {"margin": 0.5}, row | {"margin": None}, row)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: 'margin' says .* 'drop'"):
        load(tmp_path, *rows, margins=True)
    found = load(tmp_path, *rows, margins=True, unanswered="drop")
    assert only(found).grades == (0.5, 0.0) and "2 rows are left out" in found.notes[0]
    ranked = {"prompt": ASK, "completions": [*"ab"], "ranks": [1, 3]}
    assert only(load(tmp_path, ranked, margins=True)).grades == (-1.0, -3.0)
    for other in (
        {"prompt": ASK, "completion_A": "a", "completion_B": "b", "label": "A"},
        {"prompt": ASK, "completions": [*"ab"], "num_correct": 1},
    ):
        with pytest.raises(UserError, match="do not say by how much"):
            load(tmp_path, other, margins=True)


def test_a_column_that_is_null_gives_way_to_one_with_a_value(tmp_path: Path) -> None:
    """Tables of several forms have every column in every row."""
    asked = {"question": None, "prompt": ASK, "chosen": "a", "rejected": "b"}
    assert only(load(tmp_path, asked)).prompt == ASK
    whole = {side: [user(ASK), reply(text)] for side, text in (("chosen", "a"), ("rejected", "b"))}
    assert only(load(tmp_path, whole | {"prompt": None})).prompt == (user(ASK),)
    liked = {"prompt": ASK, "chosen": None, "rejected": None, "completion": "a", "label": True}
    assert only(load(tmp_path, liked)).grades == (1.0,)
    with pytest.raises(UserError, match=r"the prompt 'prompt' is empty.*'drop'"):
        load(tmp_path, {"prompt": None, "chosen": "a", "rejected": "b"})


def test_an_empty_system_message_is_one(tmp_path: Path) -> None:
    """Some chat templates write a system message of their own only where there is none."""
    asked = [{"role": "system", "content": ""}, user(ASK)]
    row = {side: [*asked, reply(text)] for side, text in (("chosen", "a"), ("rejected", "b"))}
    assert only(load(tmp_path, row)).prompt == tuple(asked)


def test_windows_line_ends_separate_turns_too(tmp_path: Path) -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    row = {"chosen": f"{text}d", "rejected": f"{text}e"}
    windows = {name: value.replace("\n", "\r\n") for name, value in row.items()}
    asked = {"prompt": text}, {"prompt": text.replace("\n", "\r\n")}
    for chat in (True, False):
        wanted = only(load(tmp_path, row, chat=chat))
        assert only(load(tmp_path, windows, chat=chat)) == wanted
        assert only(load(tmp_path, asked[1] | windows, chat=chat)) == wanted
        assert only(load(tmp_path, asked[1] | PAIR, chat=chat)).prompt == (
            only(load(tmp_path, asked[0] | PAIR, chat=chat)).prompt
        )
    sampled = {"prompt": "a\r\nb", "provenance": {"model": "m"}}
    rows = [sampled | {"completion": f"{n}\r\n", "reward": n} for n in (0, 1)]
    found = only(load(tmp_path, *rows))
    assert (found.prompt, found.completions) == ("a\r\nb", ("0\r\n", "1\r\n"))
    with pytest.raises(UserError, match="ends with a turn of Human"):
        load(tmp_path, asked[1] | {"chosen": "d\r\n\r\nHuman: e", "rejected": "f"})


@pytest.mark.parametrize(
    ("rows", "noted"),
    [
        (
            [{"prompt": ASK, "completion": text, "label": False} for text in "ab"],
            "all 2 completions have the label false",
        ),
        (
            [
                {
                    "prompt": "x",
                    "chosen": [user(ASK), reply("a")],
                    "rejected": [user(ASK), reply("b")],
                }
            ],
            "1 of 1 rows have whole conversations, and beside them a prompt that is not in them",
        ),
        (
            [{"question": ASK, "context": "2 is one more.", "chosen": "2", "rejected": "3"}],
            "1 of 1 rows have a text in 'context' that is not in the prompt column",
        ),
        (
            [{"prompt": ASK, "input": "in words", "chosen": "2", "rejected": "3"}],
            "1 of 1 rows have a text in 'input' that is not in the prompt",
        ),
        (
            [{"prompt": ASK, "chosen": "2", "rejected": "3", "margin": n} for n in (1, 2)],
            "1 comparisons repeat an earlier one (the first: ",
        ),
        (
            [{"prompt": ASK, "completions": ["2", "3"], "scores": [n, 5]} for n in (3, 9, 8)],
            "2 comparisons contradict an earlier one",
        ),
        (
            [{"prompt": ASK, "completion": "2", "label": n} for n in (True, False)],
            "1 comparisons contradict an earlier one",
        ),
    ],
)
def test_what_is_not_read_is_noted(tmp_path: Path, rows: list[dict[str, Any]], noted: str) -> None:
    given = {"prompt_field": "question"} if "question" in rows[0] else {}
    assert any(noted in note for note in load(tmp_path, *rows, **given).notes)


@pytest.mark.parametrize(
    "row",
    [
        ULTRAFEEDBACK | {"instruction": ASK, "context": ""},
        {"prompt": ASK, "messages": [user(ASK), reply("2")], "chosen": "2", "rejected": "3"},
        {"prompt": f"{ASK}\nin  words", "input": "in\nwords", "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": "2", "rejected": "3", "messages": "[{'role': 'user'}]"},
        {"prompt": ASK, "chosen": "2", "rejected": "3", "context": '[{"role": oops'},
    ],
)
def test_a_column_that_has_nothing_new_is_not_noted(tmp_path: Path, row: dict[str, Any]) -> None:
    assert load(tmp_path, row).notes == []


def test_comparisons_that_only_look_alike_are_not_noted(tmp_path: Path) -> None:
    ranked = [{"prompt": ASK, "completions": ["2", "3", "4"], "scores": [1, 2, n]} for n in (2, 1)]
    sampled = [
        {"prompt": ASK, "completion": text, "reward": float((text == "2") != (task == "b"))}
        | {"provenance": {"task": task, "sample": 0, "model": "m"}}
        for task in "ab"
        for text in "23"
    ]
    assert load(tmp_path, *ranked).notes == load(tmp_path, *sampled).notes == []


def test_the_prompt_of_several_turns_is_all_but_the_last_reply(tmp_path: Path) -> None:
    before = [user("a"), reply("b"), user("c")]
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    rows: tuple[dict[str, Any], ...] = (
        {"chosen": [*before, reply("d")], "rejected": [*before, reply("e")], "prompt": "a"},
        {"chosen": f"{text}d", "rejected": f"{text}e"},
    )
    for row in rows:
        task = only(load(tmp_path, row))
        assert list(task.prompt) == before
        assert ranked(group(load(tmp_path, row))) == [expected(before, one) for one in "de"]


def test_a_dialogue_stays_text_without_a_template(tmp_path: Path) -> None:
    """The reply keeps its leading space, which is a part of its first token."""
    before = "\n\nHuman: a\n\nAssistant:"
    cut = {"chosen": f"{before} d", "rejected": f"{before} e\n\nHuman:"}
    for row in (
        cut,
        {"prompt": before, **{side: text[len(before) :] for side, text in cut.items()}},
    ):
        task = only(load(tmp_path, row, chat=False))
        assert (task.prompt, task.completions) == (before, (" d", " e"))


def test_sampled_replies_to_a_dialogue_stay_as_they_are(tmp_path: Path) -> None:
    before, texts = "\n\nHuman: a\n\nAssistant:", (" b\n\nHuman: c", " d\n\nHuman:")
    rows = [
        {"prompt": before, "completion": text, "reward": k, "provenance": {"model": "m"}}
        for k, text in enumerate(texts)
    ]
    assert only(load(tmp_path, *rows, chat=False)).completions == texts


def test_a_text_that_is_no_dialogue_keeps_what_looks_like_one(tmp_path: Path) -> None:
    texts = (" d\n\nHuman:", "\n\nHuman: a\n\nAssistant: b\n\nHuman: c")
    row = {"prompt": "Write a dialogue", "chosen": texts[0], "rejected": texts[1]}
    assert only(load(tmp_path, row)).completions == texts


def test_a_reply_that_the_prompt_begins_is_said_to_be_left_out(tmp_path: Path) -> None:
    row = {"prompt": [user(ASK), reply("It is ")], "chosen": "2", "rejected": "3"}
    found = load(tmp_path, row)
    assert only(found).prompt == (user(ASK),)
    assert "1 of 1 prompts end with a reply" in found.notes[0]
    assert "data.prompt_form = 'continued'" in found.notes[0]
    going_on = load(tmp_path, row, prompt_form="continued")
    assert only(going_on).prefill == "It is " and not going_on.notes
    assert not load(tmp_path, ULTRAFEEDBACK, prompt_field="messages").notes
    some = load(tmp_path, row, {**row, "prompt": [user(ASK)]})  # which 'continued' refuses
    assert "1 of 2 prompts" in some.notes[0] and "continued" not in some.notes[0]


def test_system_messages_tools_and_variables_of_the_template(tmp_path: Path) -> None:
    row = {"prompt": ASK, "chosen": "2", "rejected": "3", "tools": [TOOL], "system": "be good"}
    task = only(load(tmp_path, row | {"chat_template_kwargs": {"enable_thinking": False}}))
    assert list(task.prompt) == [{"role": "system", "content": "be good"}, user(ASK)]
    assert (task.tools, task.template_args) == ((TOOL,), {"enable_thinking": False})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    made = only(load(tmp_path, {"prompt": ASK, "chosen": called, "rejected": "3", "tools": [TOOL]}))
    assert made.completions == ({"role": "assistant", "content": "", "tool_calls": [call]}, "3")
    first, second = group(
        load(tmp_path, {"prompt": ASK, "chosen": called, "rejected": "3"})
    ).trajectories
    assert first.tokens[: first.prompt_length] == second.tokens[: second.prompt_length]


def test_a_parquet_file_pads_messages(tmp_path: Path) -> None:
    """Arrow gives all messages of a column the same fields."""
    chosen = [[user(ASK), {**reply(GOOD), "name": None}], [{**user("?"), "name": "x"}, reply("!")]]
    rejected = [[user(ASK), reply(BAD)], [{**user("?"), "name": "x"}, reply(".")]]
    parquet.write_table(
        pyarrow.table({"chosen": chosen, "rejected": rejected}), tmp_path / "rows.parquet"
    )
    found = load_comparisons(
        DataConfig(source=str(tmp_path / "rows.parquet"), heldout=0),
        ComparisonsConfig(),
        seed=0,
        chat=True,
    )
    assert list(found.train[0].prompt) == [user(ASK)]
    assert found.train[0].completions == (reply(GOOD), reply(BAD))  # type: ignore[attr-defined]


def test_rows_that_are_no_pair_are_counted_by_kind(tmp_path: Path) -> None:
    rows = [
        {"prompt": ASK, "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": "2", "rejected": " "},
        {"prompt": "", "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": "2", "rejected": "2\n"},
        {"prompt": ASK, "chosen": [user("a"), reply("b")], "rejected": [user("c"), reply("d")]},
        {"prompt": ASK, "chosen": "2", "rejected": "3", "margin": 0},
        {"prompt": ASK, "chosen": ["2", "4", "2 "], "rejected": ["3", "3"]},
        {"prompt": [user("")], "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": [reply("2"), user("why?")], "rejected": "3"},
        {"prompt": ASK, "chosen": "2", "rejected": "3", "margin": ""},
    ]
    labelled = {"prompt": ASK, "completion_A": "2", "completion_B": "3", "label": "A"}
    counted = {"prompt": ASK, "completions": ["2", "3"], "num_correct": 1}
    liked = {"prompt": ASK, "completion": "2", "label": True}
    for row, column in ((labelled, "label"), (counted, "num_correct"), (liked, "label")):
        for empty in (None, ""):
            found = load(tmp_path, row, row | {column: empty}, unanswered="drop")
            assert len(found.train) == 1 and "no score or verdict" in found.notes[0]
    found = load(tmp_path, *rows, unanswered="drop")
    assert [task.id for task in found.train] == ["train-0", "train-6", "train-9"]
    noted = Counter(note.split(": ")[1].split(" are")[0].split(" (")[0] for note in found.notes)
    repeats = {"1 comparisons repeat an earlier one": 1}
    assert noted == {"3 rows": 1, "2 rows": 1, "1 comparisons": 2, "2 completions": 1} | repeats
    assert all(note.rstrip(".").count(". ") == 1 for note in found.notes[:4]), "a remedy each"


def test_scores_and_labels_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    scored = [
        {"prompt": ASK, "completion": text, "score": score}
        for text, score in zip("abcd", (1, 2, "N/A", ""), strict=True)
    ]
    found = load(tmp_path, *scored, unanswered="drop")
    assert only(found).grades == (1.0, 2.0) and "2 rows are left out" in found.notes[0]
    with pytest.raises(UserError, match=r"rows\.jsonl:3: 'score' must be a finite number"):
        load(tmp_path, *scored)
    labels = [{"prompt": ASK, "completion": "a", "label": label} for label in (True, None)]
    assert len(load(tmp_path, *labels, unanswered="drop").train) == 1


def test_ties_are_counted_without_being_asked(tmp_path: Path) -> None:
    rows = [
        {"prompt": ASK, "response_a": "2", "response_b": "3", "winner": winner}
        for winner in ("model_a", "tie", "Tie (bothbad)")
    ]
    found = load(tmp_path, *rows)
    assert len(found.train) == 1 and "2 comparisons are left out: no completion" in found.notes[0]


def test_prompts_that_are_held_out_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 4}", "chosen": f"a{n}", "rejected": "b"} for n in range(8)]
    found = load(tmp_path, *rows, heldout=2)
    held = {task.prompt for task in found.heldout}
    assert len(found.heldout) == 2
    assert held.isdisjoint(task.prompt for task in found.train)
    assert len(found.train) == 8 - 2 * len(held)
    assert any("prompts also occur in the held-out" in note for note in found.notes)


def test_sources_of_different_forms(tmp_path: Path) -> None:
    sources = []
    for name, (row, _) in (("uf", ONE_PAIR["UltraFeedback"]), ("nemo", ONE_PAIR["NeMo"])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        sources.append(SourceConfig(source=str(tmp_path / f"{name}.jsonl"), name=name))
    data = DataConfig(sources=tuple(sources), heldout=0)
    found = load_comparisons(data, ComparisonsConfig(), seed=0, chat=True)
    assert [(task.id, task.source) for task in found.train] == [
        ("uf/train-0", "uf"),
        ("nemo/train-0", "nemo"),
    ]
    assert found.weights == {"uf": 1.0, "nemo": 1.0}


PAIR = {"prompt": ASK, "chosen": "2", "rejected": "3"}
LIST = {"prompt": ASK, "completions": ["2", "3"]}
BAD_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no columns": ({"prompt": ASK}, {}, "no columns of a comparison.*chosen and rejected"),
    "a form without its columns": (PAIR, {"form": "unpaired"}, "'unpaired'.*completion and label"),
    "a named column that is missing": (PAIR, {"chosen_field": "best"}, "best and rejected"),
    "no prompt": ({"chosen": "2", "rejected": "3"}, {}, "no prompt.*data.prompt_field"),
    "no such prompt": (PAIR, {"data.prompt_field": "ask"}, "'ask'.*data.prompt_field"),
    "no prompt before a reply": ({"chosen": [reply("2")], "rejected": "3"}, {}, "no prompt"),
    "an empty prompt": (PAIR | {"prompt": " "}, {}, "'prompt' is empty.*unanswered"),
    "a prompt of another type": (PAIR | {"prompt": 3}, {}, "'prompt' must be text or a list"),
    "a prompt that ends with a system message": (
        PAIR | {"prompt": [user("a"), {"role": "system", "content": "b"}]},
        {},
        "system message comes first",
    ),
    "an empty side": (PAIR | {"rejected": ""}, {}, "'rejected' is empty.*'drop'"),
    "no side": (PAIR | {"rejected": None}, {}, "'rejected' is empty.*'drop'"),
    "an empty reply": (
        PAIR | {"rejected": [user("a"), reply("")]},
        {},
        "'rejected' has an empty turn.*'drop'",
    ),
    "an empty reply of a dialogue": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: "},
        {},
        "last reply is empty.*'drop'",
    ),
    "only a marker after the prompt of a dialogue": (
        {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": "b", "rejected": " \n\nHuman:"},
        {},
        "'rejected' is empty.*'drop'",
    ),
    "a dialogue that ends with a question": (
        {side: f"\n\nHuman: a\n\nAssistant: {side}\n\nHuman: c" for side in ("chosen", "rejected")},
        {},
        "'chosen' ends with a turn of Human.*'drop'",
    ),
    "an empty turn of a dialogue": (
        {side: f"\n\nHuman:\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        {},
        "turn of the dialogue is empty.*'drop'",
    ),
    "two turns of Human": (
        {side: f"\n\nHuman: a\n\nHuman: b\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        {},
        "do not alternate.*'drop'",
    ),
    "equal sides": (PAIR | {"rejected": "2"}, {}, "completions are equal.*'drop'"),
    "different prompts": (
        {"chosen": [user("a"), reply("b")], "rejected": [user("c"), reply("d")]},
        {},
        "different prompts.*'drop'",
    ),
    "a prompt that is not that of the conversations": (
        {"prompt": [user("z")], "chosen": [user("a"), reply("b")], "rejected": "d"},
        {},
        "different prompts.*'drop'",
    ),
    "a longer conversation on one side": (
        {
            "chosen": [user("a"), reply("b")],
            "rejected": [user("a"), reply("b"), user("c"), reply("d")],
        },
        {},
        "different prompts.*last reply",
    ),
    "several messages after the prompt": (
        PAIR | {"chosen": [reply("a"), user("b"), reply("c")]},
        {},
        "'chosen' has 3 messages after the prompt.*one reply",
    ),
    "a side that ends with the user": (
        PAIR | {"chosen": [user("a")]},
        {},
        "'chosen' must end with a reply of the assistant.*user",
    ),
    "a side of another type": (PAIR | {"chosen": 2}, {}, "'chosen' must be text or a list"),
    "a message of another form": (PAIR | {"chosen": [{"text": "2"}]}, {}, "a message is an object"),
    "an unknown role": (PAIR | {"chosen": [{"role": "bot", "content": "2"}]}, {}, "role 'bot'"),
    "messages as Python prints them": (
        PAIR | {"chosen": "[{'role': 'assistant', 'content': '2'}]"},
        {},
        "as Python prints it",
    ),
    "a negative margin": (PAIR | {"margin": -1}, {}, "'margin' is -1.*Swap"),
    "a margin that is no number": (
        PAIR | {"margin": "big"},
        {},
        "'margin' must be a finite number",
    ),
    "an infinite margin": (PAIR | {"margin": "inf"}, {}, "'margin' must be a finite number"),
    "a named margin that is missing": (PAIR, {"margin_field": "gap"}, "'gap'.*margin_field"),
    "an unknown verdict": (
        {"prompt": ASK, "response_a": "2", "response_b": "3", "winner": "left"},
        {},
        "'winner' must be A, B or Tie",
    ),
    "a label of another type": (
        {"prompt": ASK, "completion": "2", "label": 0.5},
        {},
        "'label' must be true or false, got 0.5",
    ),
    "completions that are no list": (
        LIST | {"completions": {"a": 1}},
        {},
        "must be a list of compl",
    ),
    "completions without scores": (LIST, {}, "have no reward, score, rank.*score_field"),
    "too few scores": (LIST | {"scores": [1]}, {}, "'scores' must be a list of 2 numbers"),
    "a score that is no number": (LIST | {"scores": [1, True]}, {}, "'scores' must be a finite"),
    "a score that is missing": (LIST | {"scores": [1, None]}, {}, "no number in 'scores'.*'drop'"),
    "a completion without its text": (
        {"prompt": ASK, "completions": [{"text": "2", "rank": 1}, {"text": "3", "rank": 2}]},
        {},
        r"'completions.0.completion' \(comparisons.completion_field",
    ),
    "more right completions than there are": (
        LIST | {"num_correct": 3},
        {},
        "'num_correct' must be a number from 0 to 2",
    ),
    "half a right completion": (
        LIST | {"num_correct": 1.5},
        {},
        "'num_correct' must be a number from 0 to 2, .* got 1.5",
    ),
    "no verdict": (
        {"prompt": ASK, "completion_A": "2", "completion_B": "3", "label": None},
        {},
        "'label' is null or empty.*'drop'",
    ),
    "two system messages in one row": (
        {
            "system": "a",
            "prompt": [{"role": "system", "content": "b"}, user(ASK)],
            "chosen": "2",
            "rejected": "3",
        },
        {},
        "the column 'system' is not the system message among the row's messages",
    ),
    "a prompt without the system message of the conversations": (
        {
            "prompt": [user(ASK)],
            **{
                side: [{"role": "system", "content": "b"}, user(ASK), reply(text)]
                for side, text in (("chosen", "2"), ("rejected", "3"))
            },
        },
        {},
        "the prompt 'prompt' differs from what comes before the last reply of the completions",
    ),
    "a reward that is no number": (
        {"prompt": ASK, "completion": "2", "reward": "good"},
        {},
        "'reward' must be a finite number",
    ),
    "an episode": (
        {"prompt": ASK, "completion": ["2", "3"], "reward": 1},
        {},
        "'completion' has several texts.*one reply",
    ),
    "only ties": (PAIR | {"margin": 0}, {}, "0 usable comparisons of 1 rows.*better than another"),
    "a column that the form does not read": (
        PAIR,
        {"label_field": "liked"},
        "comparisons.label_field = 'liked' has no effect: .*'pair'.*labelled, unpaired",
    ),
    "a choice of pairs of single completions": (
        {"prompt": ASK, "completion": "2", "label": True},
        {"pairs": "extremes"},
        "comparisons.pairs = 'extremes' has no effect: .*'unpaired'",
    ),
    "a second system message": (
        PAIR | {"system": "a"},
        {"data.system_prompt": "b"},
        "already has a system message",
    ),
    "a call in a rendered prompt": (
        PAIR | {"chosen": [{**reply(""), "tool_calls": [{"name": "f", "arguments": {}}]}]},
        {"data.prompt_form": "rendered"},
        "tool calls.*prompt_form",
    ),
    "a lone surrogate": (PAIR | {"chosen": "\ud800"}, {}, "surrogate"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    row, given, match = BAD_ROWS[name]
    preference, data = split_settings(given)
    with pytest.raises(UserError, match=match) as error:
        load(tmp_path, row, preference=preference, **data)
    assert "\n" not in str(error.value)
    assert "rows.jsonl:1" in str(error.value) or name == "only ties"


def test_two_rows_of_one_id(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"duplicate id 'a'.*data\.id_field"):
        load(tmp_path, *({**PAIR, "id": "a", "prompt": text} for text in "xy"))


def test_a_row_that_lacks_a_column_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:2: missing field 'rejected'"):
        load(tmp_path, PAIR, {"prompt": ASK, "chosen": "2"})
