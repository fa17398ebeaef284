"""Rows of public data sets: what is read of them.

Recipes read the result as they read the source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_sets import curate, read_rows, source_text, write_lines, write_recipe

from sixfold.data.comparisons import load_comparisons
from sixfold.data.conversations import load_conversations
from sixfold.data.sources import load_tasks
from sixfold.errors import UserError
from sixfold.recipe.schema import ComparisonsConfig, DataConfig
from sixfold_curation.readers import READERS, last_box

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
USER = [{"role": "user", "content": "2+2?"}]
HH = "\n\nHuman: 2+2?\n\nAssistant:"
TESTS = [{"input": "1\n", "output": "1\n", "testtype": "stdin"}]

FORMS: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": USER,
            "reward_model": {"ground_truth": "4", "style": "rule"},
            "extra_info": {"index": "9a9b"},
        },
        *(USER, "4", "9a9b"),
    ),
    "big_math": (
        {"problem": "2+2?", "answer": "4", "source": "omni", "llama8b_solve_rate": 0.5},
        *("2+2?", "4", "row-1"),
    ),
    "numina": (
        {"source": "olympiads", "problem": "2+2?", "solution": "So \\boxed{\\frac{8}{2}}."},
        *("2+2?", "\\frac{8}{2}", "row-1"),
    ),
    "openr1": (
        {
            "problem": "2+2?",
            "solution": "4.",
            "answer": "4",
            "source": "amc",
            "uuid": "u-1",
            "generations": ["<think>"],
            "messages": CHAT,
        },
        *("2+2?", "4", "u-1"),
    ),
    "math": (
        {"problem": "2+2?", "level": "Level 1", "type": "Algebra", "solution": "\\boxed{4}"},
        *("2+2?", "4", "row-1"),
    ),
    "gsm8k": ({"question": "2+2?", "answer": "Add.\n#### 4"}, "2+2?", "4", "row-1"),
    "reasoning_gym": (
        {"question": "2+2?", "answer": "4", "metadata": {"source_dataset": "chain_sum"}},
        *("2+2?", "4", "row-1"),
    ),
    "hh": ({"chosen": f"{HH} It is 4.", "rejected": f"{HH} No."}, HH, None, "row-1"),
    "ultrafeedback": (
        {
            "source": "evol",
            "instruction": "2+2?",
            "completions": [
                {"completion": "4", "score": 5.0},
                {"completion": "5", "score": 1.0},
                {"completion": "22", "score": 2.0},
            ],
        },
        *("2+2?", "4", "row-1"),
    ),
    "ultrafeedback_binarized": (
        {
            "prompt": "2+2?",
            "chosen": [*USER, {"role": "assistant", "content": "4"}],
            "rejected": [*USER, {"role": "assistant", "content": "5"}],
            "messages": CHAT,
            "score_chosen": 8.0,
            "score_rejected": 5.0,
        },
        *(USER, None, "row-1"),
    ),
    "tulu": ({"id": "t-1", "messages": CHAT, "source": "flan"}, CHAT[:2], "4", "t-1"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        *(USER, "4", "row-1"),
    ),
    "messages": ({"messages": CHAT}, CHAT[:2], "4", "row-1"),
    "completion": ({"prompt": "2+2?", "completion": "4"}, "2+2?", "4", "row-1"),
    "alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        *("Add.\n\n2 and 2", "4", "row-1"),
    ),
    "pairs": (
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        *("2+2?", None, "row-1"),
    ),
    "swe": (
        {"instance_id": "a__b-1", "problem_statement": "It fails.", "patch": "diff", "repo": "a/b"},
        *("It fails.", "diff", "a__b-1"),
    ),
    "apps": (
        {
            "problem_id": 7,
            "question": "Echo.",
            "solutions": '["print(input())"]',
            "input_output": '{"inputs": ["1\\n"], "outputs": ["1\\n"]}',
            "starter_code": "",
        },
        *(None, "print(input())", "7"),
    ),
    "livecodebench": (
        {
            "question_id": "abc_a",
            "question_content": "Echo.",
            "public_test_cases": json.dumps(TESTS),
            "private_test_cases": json.dumps(TESTS),
            "starter_code": "",
            "metadata": "{}",
        },
        *(None, None, "abc_a"),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def f(x):\n    """Same."""\n',
            "canonical_solution": "    return x\n",
            "test": "def check(f):\n    assert f(1) == 1\n",
            "entry_point": "f",
        },
        *(None, 'def f(x):\n    """Same."""\n    return x\n', "HumanEval/0"),
    ),
    "mbpp": (
        {
            "task_id": 2,
            "text": "Write f.",
            "code": "def f(x):\n    return x",
            "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        *(None, "def f(x):\n    return x", "2"),
    ),
    "columns": ({"query": "2+2?", "target": "4", "level": 1}, "2+2?", "4", "row-1"),
}
"""Form -> a row, and the prompt (None: not compared), answer and id that are read of it."""


def made(tmp_path: Path, rows: list[dict[str, Any]], **source: Any) -> list[dict[str, Any]]:
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert curate(write_recipe(tmp_path, source_text(path, **source))) == 0
    return read_rows(tmp_path / "out" / "train.jsonl")


@pytest.mark.parametrize("form", [name for name in READERS if name != "tasks"])
def test_a_form_is_recognised_and_read(tmp_path: Path, form: str) -> None:
    row, prompt, answer, identity = FORMS[form]
    (read,) = made(
        tmp_path, [{**row, "license": "cc-by-4.0"}], licence=None, licence_field="license"
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"][0]["figures"]["sources"][0]["form"] == READERS[form].about
    assert read["id"] == f"made/{identity}"
    assert prompt is None or read["prompt"] == prompt
    assert read["answer"] == answer
    assert (read["source"], read["origin"], read["licence"]) == ("made", "human", "cc-by-4.0")
    if "source" in row:
        assert read["original_source"] == row["source"]


def written(tmp_path: Path, form: str) -> tuple[str, str]:
    """Files with a source's row, and with the row that is made of it."""
    made(tmp_path, [FORMS[form][0]])
    return str(tmp_path / "rows.jsonl"), str(tmp_path / "out" / "train.jsonl")


TASKS = {
    "dapo": {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"},
    "big_math": {"prompt_field": "problem"},
    "gsm8k": {"answer_after": "####"},
    "openr1": {"prompt_field": "problem"},
    "reasoning_gym": {},
    "tulu": {},
    "sharegpt": {},
    "columns": {"prompt_field": "query", "answer_field": "target"},
}


@pytest.mark.parametrize("form", TASKS)
def test_recipes_read_the_result_with_default_columns_as_they_read_the_source(
    tmp_path: Path, form: str
) -> None:
    before, after = (
        load_tasks(
            DataConfig(source=path, heldout=0, **more), seed=0, rewards=("short_answer",)
        ).train
        for path, more in zip(written(tmp_path, form), (TASKS[form], {}), strict=True)
    )
    assert [(one.prompt, one.answer) for one in before] == [
        (one.prompt, one.answer) for one in after
    ]


@pytest.mark.parametrize("form", ["tulu", "sharegpt", "messages", "completion", "alpaca"])
def test_sft_reads_the_result_as_it_reads_the_source(tmp_path: Path, form: str) -> None:
    before, after = (
        load_conversations(DataConfig(source=path, heldout=0), seed=0, form="auto", chat=True).train
        for path in written(tmp_path, form)
    )
    assert [(one.prompt, one.trace) for one in before] == [(one.prompt, one.trace) for one in after]


SAID, ASKED = {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3+3?"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2+2?", "completion": "4", "system": "Be brief."},
    "messages": {"prompt": USER, "completion": [SAID], "system": "Be brief."},
    "several turns": {
        "prompt": [*USER, SAID, ASKED],
        "completion": [{**SAID, "content": "6"}, ASKED, {**SAID, "content": "Still 6"}],
    },
    "alpaca": {"instruction": "2+2?", "output": "4", "system": "Be brief."},
    "chats": {"messages": [*USER, SAID], "system": "Be brief."},
    "tasks": {"question": "2+2?", "answer": "4"},
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_sft_reads_each_form_as_it_was(tmp_path: Path, form: str) -> None:
    (row,) = made(tmp_path, [CONVERSATIONS[form]])
    before, after = (
        load_conversations(DataConfig(source=path, heldout=0), seed=0, form="auto", chat=True).train
        for path in (str(tmp_path / "rows.jsonl"), str(tmp_path / "out" / "train.jsonl"))
    )
    assert [(one.prompt, one.trace) for one in before] == [(one.prompt, one.trace) for one in after]
    assert row["answer"] == ("Still 6" if form == "several turns" else "4")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_question_after_the_last_reply_is_not_asked_with_its_answer(
    tmp_path: Path, column: str
) -> None:
    made(tmp_path, [{column: [*USER, SAID, ASKED]}])
    data = DataConfig(source=str(tmp_path / "out" / "train.jsonl"), heldout=0)
    (task,) = load_tasks(data, seed=0, rewards=("short_answer",)).train
    assert (list(task.prompt), task.answer) == (USER, "4")


def test_preferences_read_a_system_message_once(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "system": "Be brief."}
    made(tmp_path, [row])
    before, after = (
        load_comparisons(
            DataConfig(source=path, heldout=0), ComparisonsConfig(), seed=0, chat=True
        ).train
        for path in (str(tmp_path / "rows.jsonl"), str(tmp_path / "out" / "train.jsonl"))
    )
    assert [one.prompt for one in before] == [one.prompt for one in after]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_calls_that_end_a_prompt_are_the_answer_that_the_reward_reads(
    tmp_path: Path, column: str
) -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    reply = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    (row,) = made(tmp_path, [{column: [*USER, reply]}])
    assert row["answer"] == [call]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("form", ["hh", "ultrafeedback", "ultrafeedback_binarized", "pairs"])
def test_preferences_read_the_result_as_they_read_the_source(
    tmp_path: Path, form: str, chat: bool
) -> None:
    found = [
        load_comparisons(
            DataConfig(source=path, heldout=0), ComparisonsConfig(), seed=0, chat=chat
        ).train[0]
        for path in written(tmp_path, form)
    ]
    before, after = ((one.prompt, one.completions, one.grades) for one in found)
    assert before == after


@pytest.mark.parametrize("form", ["apps", "livecodebench", "humaneval", "mbpp"])
def test_code_rewards_read_the_result_as_they_read_the_source(tmp_path: Path, form: str) -> None:
    before, after = (
        load_tasks(DataConfig(source=path, heldout=0), seed=0, rewards=("code",)).train[0]
        for path in written(tmp_path, form)
    )
    assert before.prompt == after.prompt
    assert json.dumps(before.columns["tests"]) == json.dumps(after.columns["tests"])


VERL = {"data_source": "x", "prompt": USER, "ability": "?", "extra_info": {"index": 3}}
TRUTHS = {
    "Skywork-OR1": ('["4"]', "4"),
    "several answers": ('["4", "5"]', '["4", "5"]'),
    "a list as answer": ("[4]", "[4]"),
    "no JSON": ("[0, 4)", "[0, 4)"),
}
"""A ground truth in rows of verl, and the answer."""


@pytest.mark.parametrize(("truth", "answer"), TRUTHS.values(), ids=TRUTHS)
def test_a_ground_truth_in_a_list(tmp_path: Path, truth: str, answer: str) -> None:
    row = {**VERL, "reward_model": {"ground_truth": truth, "style": "rule"}}
    (read,) = made(tmp_path, [row])
    assert (read["prompt"], read["answer"]) == (USER, answer)


TESTS = (
    {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]},
    [{"input": "1\n", "output": "1\n"}, {"input": "2\n", "output": "2\n"}],
)


@pytest.mark.parametrize("tests", TESTS)
def test_a_ground_truth_of_tests_becomes_tests(tmp_path: Path, tests: Any) -> None:
    """As in Eurus-2-RL and DeepCoder. The prompt stays as it is."""
    truth = json.dumps(tests)
    (read,) = made(tmp_path, [{**VERL, "reward_model": {"ground_truth": truth, "style": "rule"}}])
    assert (read["prompt"], read["answer"], read["id"]) == (USER, None, "made/3")
    assert read["tests"]["hidden"] == [["1\n", "1\n"], ["2\n", "2\n"]]
    data = DataConfig(source=str(tmp_path / "out" / "train.jsonl"), heldout=0)
    (task,) = load_tasks(data, seed=0, rewards=("code",)).train
    assert task.columns["tests"]["type"] == "stdin"


@pytest.mark.parametrize("truth", ['{"functional": "assert f(1)"}', '[{"input": "1"}]', "{}"])
def test_a_ground_truth_of_another_form_is_a_bad_row(tmp_path: Path, truth: str) -> None:
    """Unless the recipe names the column: then it is the text."""
    rows = [{**VERL, "reward_model": {"ground_truth": one}} for one in (truth, "4")]
    (read,) = made(tmp_path, rows)
    assert read["answer"] == "4"
    both = made(tmp_path, rows, answer_field="reward_model.ground_truth")
    assert [one["answer"] for one in both] == [truth, "4"]


def test_ultrafeedback_as_it_was_published(tmp_path: Path) -> None:
    replies = [("5", 2.5), ("4", 8.5), ("22", 1.0)]
    row = {
        "source": "evol_instruct",
        "instruction": "2+2?",
        "completions": [
            {"model": "m", "response": r, "overall_score": s, "fine-grained_score": s / 2}
            for r, s in replies
        ],
    }
    (read,) = made(tmp_path, [row])
    assert (read["prompt"], read["answer"]) == ("2+2?", "4")
    config = ComparisonsConfig(completion_field="response", score_field="overall_score")
    data = DataConfig(source=str(tmp_path / "out" / "train.jsonl"), heldout=0)
    (task,) = load_comparisons(data, config, seed=0, chat=False).train
    assert (task.completions, task.grades) == (("5", "4", "22"), (2.5, 8.5, 1.0))


AMBIGUOUS = {
    "R2E-Gym": (
        {"prompt": "Write an issue.", "problem_statement": "It fails.", "commit_hash": "1"},
        "prompt or problem_statement",
    ),
    "two prompts": ({"question": "a", "problem": "b", "answer": "c"}, "question or problem"),
    "two answers": ({"question": "a", "answer": "b", "target": "c"}, "answer or target"),
    "two forms": ({"prompt": "a", "completion": "b", "messages": CHAT}, "messages or completion"),
    "none": ({"a": "b", "c": "d"}, "no column is known as the prompt.*prompt_field.*a, c"),
}


@pytest.mark.parametrize(("row", "message"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_ambiguous_columns_are_refused_with_the_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [row])
    assert curate(write_recipe(tmp_path, source_text(path))) == 2
    with pytest.raises(UserError, match=message):
        raise UserError(capsys.readouterr().err)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_an_answer_beside_a_conversation_is_not_taken_for_its_reply(
    tmp_path: Path, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {column: [*USER, SAID, ASKED], "ground_truth": "6"}
    path = write_lines(tmp_path / "a.jsonl", [row])
    assert curate(write_recipe(tmp_path, source_text(path))) == 2
    assert f"prompt_field = '{column}'" in (said := capsys.readouterr().err) and "reader" in said
    (read,) = made(tmp_path, [row], prompt_field=column, answer_field="ground_truth")
    assert (read["prompt"], read["answer"]) == (row[column], "6")
    (read,) = made(tmp_path, [{column: [*USER, SAID], "answer": "4"}])  # they are the same
    assert read["answer"] == "4"


@pytest.mark.parametrize("answer", ["", " ", None, [], " 4 ", "4"])
def test_an_answer_that_is_blank_or_the_same_is_none_beside_a_conversation(
    tmp_path: Path, answer: Any
) -> None:
    reply = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    (read,) = made(tmp_path, [{"messages": [*USER, reply], "answer": answer}])
    assert read["answer"] == "4"


def test_an_answer_beside_a_conversation_is_found_in_a_later_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, broken = [*USER, SAID], {"messages": '[{"role": ', "answer": "6"}
    rows: list[dict[str, Any]] = [
        broken,
        {"messages": chat, "answer": "4"},
        {"messages": chat, "answer": "6"},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert curate(write_recipe(tmp_path, source_text(path))) == 2
    assert "answer_field = 'answer'" in (said := capsys.readouterr().err) and ":3)" in said
    (read,) = made(tmp_path, [broken, rows[1]])  # the first is a bad row
    assert read["answer"] == "4"


@pytest.mark.parametrize("form", ["messages", "pairs", "completion"])
def test_a_system_message_stays_if_other_columns_are_named(tmp_path: Path, form: str) -> None:
    forms: dict[str, dict[str, Any]] = {
        "messages": {"messages": [*USER, SAID]},
        "pairs": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        "completion": {"prompt": "2+2?", "completion": "4"},
    }
    (read,) = made(tmp_path, [{**forms[form], "system": "Be brief.", "n": 1}], columns=["n"])
    assert (read["system"], read["n"]) == ("Be brief.", 1)


def test_a_row_with_two_system_messages_is_a_bad_row_as_in_recipes(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "system": text} for text in ("Be kind.", "")]
    assert [row["system"] for row in made(tmp_path, rows)] == [""]


def test_named_columns_settle_it(tmp_path: Path) -> None:
    row = {"question": "a", "problem": "b", "answer": "c", "n": 4}
    (read,) = made(
        tmp_path, [row], prompt_field="problem", answer_field="n", id_field="answer", columns=["n"]
    )
    assert (read["id"], read["prompt"], read["answer"]) == ("made/c", "b", 4)
    assert "question" not in read


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("so \\boxed{4}", "4"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\fbox{7}", "7"),
        ("\\boxed{4", None),
        ("none", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_a_generator_is_a_source(tmp_path: Path) -> None:
    options = {"arithmetic": {"terms": 3}}
    source = source_text("arithmetic", origin="synthetic", limit=5)
    source += "options = {arithmetic = {terms = 3}}\n"
    assert curate(write_recipe(tmp_path, source)) == 0
    read = read_rows(tmp_path / "out" / "train.jsonl")
    tasks = load_tasks(
        DataConfig(source="arithmetic", limit=5, heldout=0, **options),  # type: ignore[arg-type]
        seed=0,
        rewards=("arithmetic",),
    ).train
    assert [(r["id"], r["prompt"], r["answer"]) for r in read] == [
        (f"made/{t.id}", t.prompt, t.answer) for t in tasks
    ]


def write_saved(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)


def write_shards(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    write_lines(path / "train-00000.jsonl", rows[:1])
    write_lines(path / "train-00001.jsonl", rows[1:])
    write_lines(path / "test-00000.jsonl", [{"question": "held out", "answer": "1"}])


UNUSED = {
    "reader of a generator": ("arithmetic", {"reader": "hh"}, "reader is not for generators"),
    "columns of a generator": ("arithmetic", {"answer_after": "#"}, "answer_after is not for"),
    "split of a file": ("a.jsonl", {"split": "test"}, "split is for folders"),
    "split that a folder lacks": (".", {"split": "dev"}, "no file of the split 'dev'; it has a.js"),
    "answer of pairs": ("a.jsonl", {"answer_field": "x"}, "reader 'pairs' does not use answer_f"),
}


@pytest.mark.parametrize(("data", "more", "message"), UNUSED.values(), ids=UNUSED)
def test_settings_without_effect_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: str,
    more: dict[str, str],
    message: str,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    named = data if data == "arithmetic" else folder / data
    assert curate(write_recipe(tmp_path, source_text(named, **more))) == 2
    assert message in capsys.readouterr().err


def test_files_of_hidden_folders_are_no_part_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / ".ipynb_checkpoints").mkdir(parents=True)
    for place in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"):
        write_lines(tmp_path / "data" / place, [{"question": place, "answer": 1}])
    assert curate(write_recipe(tmp_path, source_text(tmp_path / "data"))) == 0
    assert [row["prompt"] for row in read_rows(tmp_path / "out" / "train.jsonl")] == ["a.jsonl"]


def test_numina_says_that_a_row_has_no_answer(tmp_path: Path) -> None:
    """NuminaMath 1.5 writes "proof" and "notfound" in the column of the answer."""
    solution = r"So \boxed{7}."
    answers = [("5", solution), ("proof", solution), ("notfound", solution), ("notfound", "No.")]
    rows = [
        {"problem": f"{n}?", "solution": text, "answer": answer, "source": "olympiads"}
        for n, (answer, text) in enumerate(answers)
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert curate(write_recipe(tmp_path, source_text(path))) == 0
    read = read_rows(tmp_path / "out" / "train.jsonl")
    assert [(row["prompt"], row["answer"]) for row in read] == [("0?", "5"), ("2?", "7")]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"][0]["dropped"] == {"no_answer": 2}


@pytest.mark.parametrize("write", [write_saved, write_shards])
def test_folders_are_sources(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    write(tmp_path / "data", rows)
    assert curate(write_recipe(tmp_path, source_text(tmp_path / "data"))) == 0
    read = read_rows(tmp_path / "out" / "train.jsonl")
    assert [(one["prompt"], one["answer"]) for one in read] == [
        (one["question"], one["answer"]) for one in rows
    ]
