"""The stored form of evaluations: before and after are compared task by task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.evaluation.evaluate import Evaluation
from sixfold.evaluation.record import (
    compare,
    difference_entry,
    final_rows,
    record,
    samples,
    shown,
    solved_if,
    summary_entries,
    task_values,
)
from sixfold.evaluation.statistics import paired_test
from sixfold.types import Group, Reward, Task, Trajectory


def found(solved: list[bool], source: str = "") -> dict[str, Any]:
    """Record of one sample per task, as read back from a checkpoint."""
    groups = [
        Group(
            Task(str(i), "", source=source or f"half {i % 2}"),
            [
                Trajectory.one_turn(
                    str(i), 0, [1], [2], [-1.0], [0], "stop",
                    reward=Reward(float(right), solved=right, score=float(right)),
                )
            ],
        )
        for i, right in enumerate(solved)
    ]  # fmt: skip
    return json.loads(json.dumps(record(Evaluation(groups))))


BEFORE, AFTER = [False] * 20 + [True] * 20, [False] * 2 + [True] * 37 + [False]


def test_the_difference_is_paired_and_after_minus_before() -> None:
    test = compare(found(BEFORE, "a"), found(AFTER, "a"))
    assert test == paired_test([float(s) for s in AFTER], [float(s) for s in BEFORE])
    entry = json.loads(json.dumps(difference_entry(test)))
    assert (entry["mean"], entry["better"], entry["worse"]) == (17 / 40, 18, 1)
    low, high = entry["interval"]
    assert low < 17 / 40 < high and entry["p_value"] == 2 * (1 + 19) / 2**19


def test_a_task_without_an_answer_has_an_empty_answer_in_the_samples() -> None:
    assert [sample.answer for sample in samples(found([True, False]))] == ["", ""]


def test_records_without_values_or_of_other_tasks_are_not_compared() -> None:
    old = {key: value for key, value in found(BEFORE, "a").items() if key != "values"}
    assert compare(old, found(AFTER, "a")) is None
    assert compare(found(AFTER[:-1], "a"), found(AFTER, "a")) is None


def test_the_table_on_the_screen_has_the_figures() -> None:
    before, after = found(BEFORE), found(AFTER)
    rows = {name: (old, new) for name, old, new in final_rows(before, after, None)}
    assert rows["held-out solved"] == ("50.0%", "92.5%")
    assert rows["95% interval"] == ("35.2% to 64.8%", "80.1% to 97.4%")
    assert rows["  half 0"] == ("50.0%", "95.0%") and "difference" not in rows
    rows = {row[0]: row[2] for row in final_rows(before, after, compare(before, after))}
    assert rows["difference"].startswith("+42.5 points (+") and "p = 7.6e-05" in rows["difference"]


def test_the_rule_for_solved_names_the_reward_once() -> None:
    assert solved_if("math >= 1").endswith(" if reward math >= 1")
    assert solved_if("reward >= 2").endswith(" if reward >= 2")


def test_an_evaluation_without_any_reply_names_the_failure() -> None:
    """Every environment fails at its start, and the error budget allows that."""
    failed = Trajectory(
        "a", 0, [1, 2], "pp", [0.0] * 2, [-1] * 2, (), "error", reward=Reward(None, error="no tool")
    )
    with pytest.raises(UserError, match=r"no tool.*environment\.episode"):
        record(Evaluation([Group(Task("a", "?"), [failed])]))


def test_verdicts_are_counted_in_the_record_the_metrics_and_the_table() -> None:
    def evaluation(*verdicts: Any) -> Evaluation:
        rewards = [Reward(float(v == "passed"), solved=v == "passed", verdict=v) for v in verdicts]
        made = [
            Trajectory.one_turn("a", k, [1], [2], [-1.0], [0], "stop", reward=reward)
            for k, reward in enumerate(rewards)
        ]
        return Evaluation([Group(Task("a", "?"), made)])

    before = evaluation("passed", "timeout", "timeout", "wrong_answer")
    after = evaluation("passed", "passed", "passed", "wrong_answer")
    assert before.metrics()["heldout/verdict/timeout"] == 0.5
    found = [json.loads(json.dumps(record(e))) for e in (before, after)]
    assert found[0]["verdicts"] == {"passed": 1, "wrong_answer": 1, "timeout": 2}
    assert summary_entries("heldout_after", found[1])["heldout_after_verdicts"] == {
        "passed": 3,
        "wrong_answer": 1,
    }
    rows = {name: (old, new) for name, old, new in final_rows(*found, None)}
    assert rows["timeout"] == ("2", "0")
    assert "passed" not in rows and "wrong_answer" not in rows
    assert found[0]["samples"][0]["verdict"] == "passed"
    assert shown(found[0]).endswith(", 2 timeout") and "timeout" not in shown(found[1])


def test_a_task_has_one_key_in_every_run() -> None:
    """Whatever its place, id and columns. A task that is there twice counts twice."""
    tasks = [
        Task("0", "1+1=", "2"),
        Task("1", "1+2=", "3"),
        Task("2", "1+1=", "2"),
        Task("3", "1+1=", "2", world="seed 5"),
    ]
    here = task_values(tasks, {"values": [0.25, 0.5, 0.75, 1.0]})
    moved = [
        Task("9", "1+2=", "3", columns={"row": 4}),
        Task("8", "1+1=", "2", world="seed 5"),
        Task("7", "1+1=", "2"),
    ]
    there = task_values(moved, {"values": [0.0, 0.1, 0.2]})
    assert len(here) == 4
    assert {there[key]: here[key] for key in here if key in there} == {
        0.0: 0.5,
        0.1: 1.0,
        0.2: 0.25,
    }
