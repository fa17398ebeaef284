"""Rows of code benchmarks as tasks, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task
from sixfold_environments.code.languages import LANGUAGES, Language

MBPP: dict[str, Any] = {
    "task_id": 7,
    "text": "Add two numbers.",
    "code": "def add(a, b): return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
PLAIN: dict[str, Any] = {
    "id": "p",
    "question": "Add.",
    "tests": {"type": "stdin", "cases": [["1 2", "3"]]},
}


def load(tmp_path: Path, row: dict[str, Any], **settings: Any) -> Task:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    rewards = settings.pop("rewards", ("code",))
    data = DataConfig(source=str(path), heldout=0, **settings)
    return load_tasks(data, seed=0, rewards=rewards).train[0]


def test_a_benchmark_is_recognised_by_its_columns(tmp_path: Path) -> None:
    task = load(tmp_path, MBPP)
    assert task.id == "7"
    assert task.answer == MBPP["code"]
    assert task.prompt_text.startswith("Add two numbers.")
    assert task.columns["tests"]["hidden"] == ["assert add(0, 0) == 0"]
    assert "test_list" not in task.columns
    assert load(tmp_path, MBPP, format="mbpp") == task


def test_another_reward_or_a_named_prompt_keeps_the_rows_as_they_are(tmp_path: Path) -> None:
    task = load(tmp_path, MBPP, prompt_field="text", rewards=("m:f",))
    assert task.prompt == "Add two numbers."
    assert "tests" not in task.columns
    task = load(tmp_path, MBPP, prompt_field="text", rewards=("m:f",), format="rows")
    assert task.columns["test_list"] == MBPP["test_list"]


def test_rows_may_have_tests_of_their_own(tmp_path: Path) -> None:
    assert load(tmp_path, PLAIN).columns["tests"] == PLAIN["tests"]
    text = {**PLAIN, "tests": json.dumps(PLAIN["tests"])}
    assert load(tmp_path, text).columns["tests"] == text["tests"]


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"id": "x", "question": "q"}, {}, ("no tests", "'tests'")),
        ({**PLAIN, "tests": {"type": "stdin", "cases": []}}, {}, ("no tests",)),
        ({**MBPP, "test_list": ["assert add(1 == 3"]}, {}, ("does not compile",)),
        ({**MBPP, "test_list": []}, {}, ("mbpp", "data.format")),
        (PLAIN, {"format": "apps"}, ("input_output", "data.format")),
    ],
)
def test_tasks_without_usable_tests_are_refused_with_their_row(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, row, **settings)
    for word in ("rows.jsonl:1", *words):
        assert word in str(caught.value)


def test_rows_without_tests_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PLAIN) + "\n" + json.dumps({"id": "x", "question": "q"}) + "\n")
    data = DataConfig(source=str(path), heldout=0, unanswered="drop")
    found = load_tasks(data, seed=0, rewards=("code",))
    assert [task.id for task in found.train] == ["p"]
    assert "1 of 2 rows have no usable tests" in found.notes[0]
    path.write_text(json.dumps({"id": "x", "question": "q"}) + "\n")
    with pytest.raises(UserError, match="no tests"):
        load_tasks(data, seed=0, rewards=("code",))


def test_a_missing_compiler_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Language("cpp", "solution.cpp", tool="no-such-compiler", package="g++")
    monkeypatch.setitem(LANGUAGES, "cpp", lost)
    with pytest.raises(UserError, match=r"no-such-compiler.*Install"):
        load(tmp_path, {**PLAIN, "tests": {**PLAIN["tests"], "language": "cpp"}})
