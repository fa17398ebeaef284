"""Held-out completions scored once more by a stricter verifier, and the gap to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from sixfold.checks.environment import Environment
from sixfold.errors import UserError
from sixfold.evaluation.evaluate import Evaluation, evaluate
from sixfold.evaluation.record import final_rows, record, shown, summary_entries
from sixfold.event_loop import EventLoop
from sixfold.recipe.schema import EnvironmentConfig, EvalConfig
from sixfold.report.alarms import Alarms
from sixfold.run.recipe_environment import recipe_environment, strict_environment, task_rewards
from sixfold.types import Group, Reward, Task, Trajectory

TASKS = [Task(str(number), "?", answer="12") for number in range(4)]


def answered(texts: Sequence[str], solved: Sequence[bool | None]) -> list[Group]:
    return [
        Group(task, [Trajectory.one_turn(
            task.id, 0, [1], [2], [-1.0], [0], "stop", text=text,
            reward=Reward(None, error="x") if right is None else Reward(right, solved=right),
        )])
        for task, text, right in zip(TASKS, texts, solved, strict=True)
    ]  # fmt: skip


class Played:
    """A rollout of given completions."""

    samples = 1

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    async def play(self, tasks, seed, scorer):  # type: ignore[no-untyped-def]
        for group in self.groups:
            yield group


def length(completion: str, task: Task) -> float:
    if completion == "raise":
        raise RuntimeError
    return float(len(completion) > 3)


def evaluated(solved: Sequence[bool | None], texts: Sequence[str]) -> Evaluation:
    groups = answered(texts, solved)
    loop = EventLoop()
    try:
        with Environment([length], error_budget=1.0) as strict:
            usual = Environment([length])
            return evaluate(Played(groups), usual, TASKS, 0, loop, strict)  # type: ignore[arg-type]
    finally:
        loop.close()


def test_the_gap_is_over_the_samples_that_both_verifiers_checked() -> None:
    found = evaluated([True, True, False, True], ["long answer", "no", "no", "raise"])
    assert found.strict_share == pytest.approx(1 / 3)
    assert found.strict_gap == pytest.approx(2 / 3 - 1 / 3)
    assert found.metrics()["heldout/strict_gap"] == found.strict_gap
    assert [t.reward.solved for g in found.groups for t in g.trajectories if t.reward] == [
        True, True, False, True,
    ]  # fmt: skip


def test_records_lines_and_tables_have_the_strict_share() -> None:
    found = json.loads(json.dumps(record(evaluated([True] * 4, ["long answer"] * 2 + ["no"] * 2))))
    assert summary_entries("after", found)["after_strict_gap"] == 0.5
    assert "50.0% by the strict verifier" in shown(found)
    assert ("by the strict verifier", "50.0%", "50.0%") in final_rows(found, found, None)


def test_without_a_strict_verifier_nothing_is_reported() -> None:
    found = Evaluation(answered(["a"] * 4, [True] * 4))
    assert found.strict_share is None and found.strict_gap is None
    assert not any("strict" in key for key in found.metrics())
    assert not any("strict" in key for key in summary_entries("after", record(found)))


def test_a_gap_raises_one_alarm_until_it_clears() -> None:
    alarms = Alarms()
    said = [alarms.observe({"heldout/strict_gap": gap}) for gap in (0.0, 0.2, 0.2, 0.01, 0.2)]
    assert [len(lines) for lines in said] == [0, 1, 0, 0, 1]
    assert "eval.strict" in said[1][0]


def test_the_setting_names_a_reward_that_training_does_not_use() -> None:
    training, evaluation = EnvironmentConfig(), EvalConfig(strict="math_strict")
    strict = strict_environment(training, evaluation)
    assert strict is not None and strict.part_weights == {"math_strict": 1.0}
    assert "math_strict" not in recipe_environment(training, evaluation).part_weights
    assert strict_environment(training, EvalConfig()) is None
    with pytest.raises(UserError, match=r"eval\.strict.*math_strict"):
        recipe_environment(training, EvalConfig(strict="math_strickt"))
    assert task_rewards(training, evaluation.strict) == ("arithmetic", "math_strict")
