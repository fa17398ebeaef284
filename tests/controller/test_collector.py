"""The collector: one scorer for a step, no stale groups, and phases that say what is waited for."""

from __future__ import annotations

import pytest
from tests.controller.scripted import LOOP, ScriptedRollout

from sixfold.checks.environment import Environment
from sixfold.controller.collector import Collector
from sixfold.controller.rounds import StaleGroup
from sixfold.types import Task, Trajectory

TASKS = [Task(name, "") for name in "ab"]


class Versions(ScriptedRollout):
    """Episodes whose tokens were sampled by given versions of the weights."""

    def __init__(self, *versions: int) -> None:
        super().__init__()
        self.versions = list(versions)

    def episodes(self, task: Task, seed: int) -> list[Trajectory]:
        n = len(self.versions)
        made = Trajectory.one_turn(
            task.id, 0, [1], [2] * n, [-1.0] * n, self.versions, "stop", text="x"
        )
        return [made]


def collected(rollout: Versions) -> list[str]:
    phases: list[str] = []
    with Environment([lambda completion, task: 1.0]) as environment:
        Collector(rollout, environment, LOOP).collect(TASKS, 0, phases.append)
    return phases


def test_tokens_of_other_weights_than_the_samplers_are_refused() -> None:
    rollout = Versions(3, 3)
    rollout.version = 3
    assert collected(rollout) == ["rollout", "environment"]
    for versions, of in (((2, 2), r"\[2\]"), ((3, 4), r"\[3, 4\]")):
        stale = Versions(*versions)
        stale.version = 3
        with pytest.raises(StaleGroup, match=rf"task a .*{of}.*version 3"):
            collected(stale)


def test_all_rounds_of_a_step_have_one_scorer() -> None:
    made: list[int] = []

    class Counting(Environment):
        def scorer(self, expected: int):  # type: ignore[no-untyped-def]
            made.append(expected)
            return super().scorer(expected)

    with Counting([lambda completion, task: 1.0]) as environment:
        for greedy in (None, Versions(0)):
            Collector(Versions(0), environment, LOOP, greedy=greedy).collect(
                TASKS, 0, lambda phase: None
            )
    assert made == [2, 2]
