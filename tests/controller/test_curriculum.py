"""The curriculum: easy tasks leave, hard ones come back, and the pool is never too small."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_trajectories import from_mask

from sixfold.controller.curriculum import BUCKETS, Curriculum, Limits
from sixfold.controller.dead_letters import DeadLetters
from sixfold.controller.stream import task_stream
from sixfold.types import Group, Reward, Task

LIMITS = Limits(every=5, easy=0.95, hard=0.05, retest=20, half_life=10.0, samples=8.0)
K = 8


def group(task: Task, solved: Sequence[bool | None]) -> Group:
    made = [from_mask(task.id, i, [1, 2], 1, [False, True]) for i in range(len(solved))]
    for trajectory, right in zip(made, solved, strict=True):
        value = None if right is None else float(right)
        trajectory.reward = Reward(value, solved=right)
    return Group(task, made)


def sums(count: int = 100) -> list[Task]:
    """Tasks whose difficulty grows with their number, from 0 to 1."""
    return [Task(f"t{i:03d}", "?", answer=i / (count - 1)) for i in range(count)]


def pass_rate(task: Task, skill: float) -> float:
    """The planted truth: a logistic function of skill minus difficulty."""
    return 1 / (1 + math.exp(-20 * (skill - float(task.answer))))


def rewards(task: Task, skill: float, rng: random.Random) -> Group:
    return group(task, [rng.random() < pass_rate(task, skill) for _ in range(K)])


def improved(curriculum: Curriculum, steps: int, rng: random.Random) -> list[list[Task]]:
    """Train a policy whose skill rises from 0 to 1 over the steps."""
    drawn = []
    for step in range(1, steps + 1):
        drawn.append(curriculum(step))
        curriculum.observe([rewards(task, step / steps, rng) for task in drawn[-1]])
        curriculum.trained()
    return drawn


def test_tasks_move_between_the_buckets_as_the_policy_improves() -> None:
    """R-205: the tasks of a step follow the skill of the policy, and in the end all are easy."""
    tasks, rng = sums(), random.Random(0)
    curriculum = Curriculum(tasks, 20, 0, {}, LIMITS)
    drawn = improved(curriculum, 300, rng)
    informative = [
        sum(0.05 < pass_rate(task, step / 300) < 0.95 for task in drawn[step - 1]) / 20
        for step in range(50, 250)
    ]
    fixed = task_stream(tasks, 20, 0, {})
    uniform = [
        sum(0.05 < pass_rate(task, step / 300) < 0.95 for task in fixed(step)) / 20
        for step in range(50, 250)
    ]
    assert sum(informative) > 2 * sum(uniform)
    means = [sum(float(t.answer) for t in drawn[step]) / 20 for step in (40, 140, 240)]
    assert means[0] < means[1] - 0.15 < means[2] - 0.3
    assert curriculum.metrics()["data/easy_frac"] > 0.7


def test_a_hard_task_is_held_and_tested_again() -> None:
    tasks = sums(4)
    curriculum = Curriculum(tasks, 2, 0, {}, LIMITS)
    drawn: dict[str, list[int]] = {task.id: [] for task in tasks}
    for step in range(1, 61):
        for task in curriculum(step):
            drawn[task.id].append(step)
            solved = [step > 20] * 4 + [False] * 4 if task.id == "t003" else [True, False] * 4
            curriculum.observe([group(task, solved)])
        curriculum.trained()
    first = [step for step in drawn["t003"] if step <= 5]
    back = [step for step in drawn["t003"] if step > 5]
    assert first and back[0] in (26, 27)  # held at step 5, tested again from 20 steps after that
    assert len(back) >= 15  # it has learned meanwhile, so it stays


def test_the_pass_rate_forgets_an_old_policy() -> None:
    """Half-life of 10 steps: 8 failures at step 1 weigh 8 x 2^-2 = 2 at step 21."""
    limits = Limits(every=1, easy=0.79, hard=0.05, retest=0, half_life=10.0, samples=8.0)
    (task, other) = sums(2)
    curriculum = Curriculum([task, other], 2, 0, {}, limits)
    curriculum.observe_step([group(task, [False, True] + [False] * 6)])
    for _ in range(19):
        curriculum.observe_step([])
    curriculum.observe_step([group(task, [True] * 8)])
    rate = curriculum.state()["rates"][task.id]
    assert rate == pytest.approx([1 * 0.25 + 8, 8 * 0.25 + 8, 21])
    assert curriculum.metrics()["data/easy_frac"] == 0.5  # 8.25 / 10 is above 0.79


def test_prompts_at_a_pass_rate_of_nine_tenths_are_dropped() -> None:
    """ScaleRL's rule, as one setting: easy = 0.9, hard = 0."""
    tasks = sums(4)
    limits = Limits(every=1, easy=0.9, hard=0.0, retest=1, half_life=1e9, samples=10.0)
    curriculum = Curriculum(tasks, 1, 0, {}, limits)
    for task, solved in zip(tasks, (9, 8, 10, 1), strict=True):
        curriculum.observe([group(task, [True] * solved + [False] * (10 - solved))])
    curriculum.trained()
    assert [task.id for task in curriculum.pool] == ["t001", "t003"]
    assert [move[:3] for move in curriculum.record["moved"]] == [  # type: ignore[index]
        ["t000", "new", "easy"],
        ["t001", "new", "train"],
        ["t002", "new", "easy"],
        ["t003", "new", "train"],
    ]


def test_failed_checks_and_few_samples_do_not_count() -> None:
    task, other = sums(2)
    curriculum = Curriculum([task, other], 1, 0, {}, Limits(1, 0.95, 0.05, 0, 50.0, 8.0))
    curriculum.observe_step([group(task, [True] * 7 + [None] * 9)])
    assert curriculum.state()["rates"][task.id][:2] == [7, 7]
    assert curriculum.metrics()["data/new_frac"] == 1.0
    curriculum.observe_step([group(other, [None] * 8)])
    assert set(curriculum.state()["rates"]) == {task.id}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(2, 12),
    st.sampled_from([{}, {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 1.0}]),
    st.lists(st.integers(0, K), min_size=12, max_size=12),
)
def test_a_step_has_as_many_prompts_as_without_a_curriculum(
    per_step: int, count: int, weights: Mapping[str, float], solved: list[int]
) -> None:
    """Also if all tasks are easy, or hard, and of each source its share."""
    tasks = [Task(f"t{i}", "?", source="ab"[i % 2]) for i in range(count)]
    curriculum = Curriculum(tasks, per_step, 0, weights, Limits(1, 0.95, 0.05, 3, 50.0, 1.0))
    plain = task_stream(tasks, per_step, 0, weights)
    for step in range(1, 9):
        chosen = curriculum(step)
        assert len({task.id for task in chosen}) == len(chosen) == len(plain(step))
        if weights:
            assert Counter(t.source for t in chosen) == Counter(t.source for t in plain(step))
        curriculum.observe_step(
            [group(t, [i < solved[int(t.id[1:])] for i in range(K)]) for t in chosen]
        )


def test_spared_tasks_are_those_nearest_to_one_half() -> None:
    tasks = sums(5)
    curriculum = Curriculum(tasks, 2, 0, {}, Limits(1, 0.6, 0.4, 0, 50.0, 8.0))
    for task, right in zip(tasks, (0, 3, 6, 8, 1), strict=True):
        curriculum.observe([group(task, [i < right for i in range(8)])])
    curriculum.trained()
    assert [task.id for task in curriculum.pool] == ["t001", "t002"]
    assert curriculum.metrics()["data/spared"] == 2


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 1.0}])
def test_prompts_that_are_set_aside_are_not_drawn(weights: Mapping[str, float]) -> None:
    """All others have left: without those, a run ahead would look for a prompt for ever."""
    tasks = [Task(f"t{i}", "?", source="ab"[i % 2]) for i in range(8)]
    letters = DeadLetters(1, tasks, weights)
    limits = Limits(1, 0.95, 0.05, 0, 10.0, 8.0)
    curriculum = Curriculum(tasks, 4, 0, weights, limits, dead=letters)
    curriculum.observe_step([group(task, [True] * K) for task in tasks[4:]])
    assert {task.id for task in curriculum(2)} == {"t0", "t1", "t2", "t3"}
    letters.load({"ids": ["t0", "t1", "t3"]})
    assert {task.id for task in curriculum(2)} == {"t0", "t1", "t2", "t3"}  # it has begun
    chosen = curriculum(3)
    assert "t2" in {task.id for task in chosen} and len({task.id for task in chosen}) == 4
    assert not {"t0", "t1", "t3"} & {task.id for task in curriculum.pool}
    assert curriculum.metrics()["data/spared"] == 3 if not weights else 2
    resumed = Curriculum(tasks, 4, 0, weights, limits, dead=letters)
    resumed.load(json.loads(json.dumps(curriculum.state())))
    assert resumed.state() == curriculum.state()
    assert resumed(3) == chosen and resumed.pool == curriculum.pool


def test_a_step_that_has_begun_keeps_its_tasks() -> None:
    """A run ahead asks for some tasks of a step before a decision, and for the rest after it."""
    tasks = sums(12)
    curriculum = Curriculum(tasks, 4, 0, {}, Limits(1, 0.95, 0.05, 0, 10.0, 8.0))
    begun = curriculum(2)
    curriculum.observe_step([group(task, [True] * K) for task in begun])
    assert curriculum(2) == begun
    assert not {t.id for t in curriculum(3)} & {t.id for t in begun}
    for step in range(4, 40):
        assert len(curriculum(step)) == 4


def test_the_first_tasks_are_those_without_a_curriculum() -> None:
    tasks = sums()
    curriculum, plain = Curriculum(tasks, 20, 3, {}, LIMITS), task_stream(tasks, 20, 3, {})
    assert all(curriculum(step) == plain(step) for step in range(1, 6))


def test_a_profile_sorts_the_tasks_before_the_first_step() -> None:
    tasks = sums(5)
    profile = {"t000": (1.0, 16.0), "t001": (0.0, 16.0), "t002": (0.5, 16.0), "t003": (1.0, 4.0)}
    curriculum = Curriculum(tasks, 2, 0, {}, LIMITS, profile)
    assert [task.id for task in curriculum.pool] == ["t002", "t003", "t004"]
    found = curriculum.metrics()
    assert [found[f"data/{name}_frac"] for name in BUCKETS] == [0.4, 0.2, 0.2, 0.2]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(0, 9))
def test_a_restored_curriculum_goes_on_with_the_same_bits(stop: int, seed: int) -> None:
    """The state passes through JSON, as in a checkpoint, with sorted keys."""
    tasks = [Task(t.id, "?", answer=t.answer, source="ab"[i % 2]) for i, t in enumerate(sums(30))]

    def made() -> Curriculum:
        limits = Limits(every=4, easy=0.8, hard=0.2, retest=7, half_life=9.0, samples=8.0)
        return Curriculum(tasks, 6, seed, {"a": 1, "b": 2}, limits)

    def go_on(curriculum: Curriculum, first: int, last: int) -> list[Any]:
        found: list[Any] = []
        for step in range(first, last + 1):
            chosen = curriculum(step)
            rng = random.Random(f"{seed}/{step}")
            curriculum.observe_step([rewards(task, step / 70, rng) for task in chosen])
            found.append([[t.id for t in chosen], json.dumps(curriculum.record)])
        return [*found, json.dumps(curriculum.state(), sort_keys=True)]

    whole = go_on(made(), 1, 70)
    halved, resumed = made(), made()
    go_on(halved, 1, stop)
    halved.observe([rewards(tasks[0], 1.0, random.Random(0))])  # a step that is not finished
    resumed.load(json.loads(json.dumps(halved.state(), sort_keys=True)))
    assert go_on(resumed, stop + 1, 70) == whole[stop:]
