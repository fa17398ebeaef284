"""The answer that was converted for the task is the value of its column, in every form of reward.

The rows have the traits of GSM8K (a worked solution, then "#### 39"), of verl's files
(`reward_model.ground_truth`), and of a decimal column in a Parquet file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from sixfold.checks.environment import Environment
from sixfold.data.columns import with_value
from sixfold.data.sources import load_tasks
from sixfold.recipe.schema import DataConfig
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.adapters.trl_env import TrlEpisode
from sixfold_serving.agents.command import task_record

WORKED = "Mara picks 4 baskets.\n#### 39"


def rows(tmp_path: Path, *given: dict[str, Any], **settings: Any) -> list[Task]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    data = DataConfig(source=str(file), heldout=0, **settings)
    return load_tasks(data, seed=0, rewards=("mine",)).train


def gsm8k(tmp_path: Path, **more: Any) -> Task:
    return rows(tmp_path, {"question": "q", "answer": WORKED, **more}, answer_after="####")[0]


def nested(tmp_path: Path) -> Task:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"style": "rule", "ground_truth": WORKED},
        "extra_info": {"index": 1},
    }
    return rows(
        tmp_path,
        row,
        prompt_field="prompt",
        answer_field="reward_model.ground_truth",
        answer_after="####",
        id_field="extra_info.index",
    )[0]


def trl(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(one == "39") for one in answer]


def plain(completion: str, task: Task) -> float:
    return float(task.answer == task.columns["answer"] == "39")


def group(group: list[Any], task: Task) -> list[float]:
    return [float(task.columns["answer"] == "39")] * len(group)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(ground_truth == "39")


def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    return [float(labels == ["39"])]


def value(reward: Callable[..., Any] | str, task: Task) -> float | None:
    one = Trajectory.one_turn(task.id, 0, [1], [2], [0.0], [0], "stop", text="39")
    with Environment([reward]) as environment:
        environment.score([Group(task, [one])])
    assert one.reward
    return one.reward.value


@pytest.mark.parametrize("reward", [trl, plain, group, verl, openrlhf])
def test_every_form_gets_the_converted_answer(reward: Callable[..., Any], tmp_path: Path) -> None:
    assert value(reward, gsm8k(tmp_path)) == 1.0


def test_a_named_reward_gets_it_in_its_process(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def right(prompts, completions, answer, **kwargs):\n"
        "    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"
    )
    assert value(f"{file}:right", gsm8k(tmp_path)) == 1.0


def test_a_column_of_another_name(tmp_path: Path) -> None:
    def right(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
        return [float(one == "39" and columns["answer"] == [one]) for one in solution]

    row = {"question": "q", "solution": WORKED}
    task = rows(tmp_path, row, answer_field="solution", answer_after="####")[0]
    assert task.columns["solution"] == "39" and value(right, task) == 1.0
    # A column `answer` beside it is another column, and stays.
    both = rows(tmp_path, {**row, "answer": "long"}, answer_field="solution", answer_after="####")[
        0
    ]
    assert (both.answer, both.columns["answer"]) == ("39", "long")


def test_nested_paths(tmp_path: Path) -> None:
    task = nested(tmp_path)
    assert task.columns["reward_model"] == {"style": "rule", "ground_truth": "39"}
    assert value(verl, task) == 1.0
    rows_of_lists = rows(
        tmp_path,
        {"question": "q", "answers": {"text": ["a", WORKED]}},
        answer_field="answers.text.1",
        answer_after="####",
    )
    assert rows_of_lists[0].columns["answers"] == {"text": ["a", "39"]}


def test_a_copy_has_the_value_and_the_row_keeps_its_own() -> None:
    fields = {"a": {"b": [{"c": 1}, {"c": 2}]}, "a.b": 3}
    assert with_value(fields, "a.b.1.c", 9) == {"a": {"b": [{"c": 1}, {"c": 9}]}, "a.b": 3}
    assert with_value(fields, "a.b", 9) == {"a": {"b": [{"c": 1}, {"c": 2}]}, "a.b": 9}
    assert fields == {"a": {"b": [{"c": 1}, {"c": 2}]}, "a.b": 3}


def test_a_decimal_is_the_same_text_in_both_places(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"question": ["q"], "answer": [Decimal("2.50")]}), path)
    data = DataConfig(source=str(path), heldout=0)
    task = load_tasks(data, seed=0, rewards=("math",)).train[0]
    assert task.answer == task.columns["answer"] == "2.50"


def test_environments_and_agents_get_it(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Game:
        def reset(self, **columns: Any) -> None:
            seen.update(columns)

    task = gsm8k(tmp_path)
    asyncio.run(TrlEpisode(task, Game()).start())
    assert seen["answer"] == "39"
    record = task_record(task, answers=True)
    assert record["answer"] == record["columns"]["answer"] == "39"


def test_the_worked_solution_stays_in_the_trace(tmp_path: Path) -> None:
    row = {"question": "q", "answer": WORKED}
    task = rows(tmp_path, row, answer_after="####", trace_field="answer")[0]
    assert (task.answer, task.trace, task.columns["answer"]) == ("39", WORKED, "39")
