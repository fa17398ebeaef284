"""Tasks of several sources: each its share of the prompts, a function of the step alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.controller.mixture import MixtureStream, least_tasks, too_small, weighted_order
from sixfold.controller.stream import TaskStream, task_stream
from sixfold.types import Task


def _tasks(**sizes: int) -> list[Task]:
    return [
        Task(f"{name}{i}", "?", source=name) for name, size in sizes.items() for i in range(size)
    ]


WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=4)


@pytest.mark.slow
@given(WEIGHTS, st.integers(1, 12), st.integers(0, 3))
def test_every_step_rounds_the_shares_and_many_steps_keep_them(
    weights: list[float], per_step: int, seed: int
) -> None:
    names = [f"s{n}" for n in range(len(weights))]
    stream = MixtureStream(
        _tasks(**dict.fromkeys(names, 30)), per_step, seed, dict(zip(names, weights, strict=True))
    )
    shares = {name: per_step * w / sum(weights) for name, w in zip(names, weights, strict=True)}
    total: Counter[str] = Counter()
    for step in range(1, 201):
        chosen = stream(step)
        assert len({t.id for t in chosen}) == len(chosen) == per_step
        found = Counter(t.source for t in chosen)
        assert all(abs(found[name] - share) < 1 + 1e-9 for name, share in shares.items())
        total += found
    assert all(
        abs(total[name] - 200 * share) < 6 for name, share in shares.items()
    )  # at random it would be 14


def test_the_tasks_of_a_source_come_once_an_epoch_in_fresh_orders() -> None:
    stream = MixtureStream(_tasks(a=12, b=60), 8, 0, {"a": 1, "b": 3})
    seen = [t.id for step in range(1, 13) for t in stream(step) if t.source == "a"]
    assert len(seen) == 24
    epochs = seen[:12], seen[12:]
    assert all(len(set(epoch)) == 12 for epoch in epochs) and sorted(epochs[0]) == sorted(epochs[1])
    orders = [
        [t.id for step in range(6 * e + 1, 6 * e + 7) for t in stream(step) if t.source == "a"]
        for e in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_step_is_a_function_of_the_step_alone(steps: list[int]) -> None:
    def fresh() -> MixtureStream:
        return MixtureStream(_tasks(a=7, b=20), 5, 3, {"a": 1, "b": 2})

    used = fresh()
    for step in steps:
        assert used(step) == fresh()(step)


def test_a_step_mixes_its_sources() -> None:
    """Minibatches are runs of a step's groups: sources in turn would give each a minibatch of its
    own.
    """
    sources = [
        "".join(t.source for t in MixtureStream(_tasks(a=40, b=40), 8, seed, {"a": 1, "b": 1})(1))
        for seed in range(20)
    ]
    assert len(set(sources)) > 10


def test_a_source_with_fewer_tasks_than_its_share_gives_all_it_has() -> None:
    chosen = MixtureStream(_tasks(a=2, b=20), 8, 0, {"a": 1, "b": 1})(3)
    assert Counter(t.source for t in chosen) == {"a": 2, "b": 4}


def test_sources_without_tasks_are_left_out_and_tasks_without_weight_refused() -> None:
    assert {t.source for t in MixtureStream(_tasks(a=20), 8, 0, {"a": 1, "b": 3})(1)} == {"a"}
    with pytest.raises(ValueError, match="source 'a', which has no weight"):
        MixtureStream(_tasks(a=1), 1, 0, {"b": 1})
    with pytest.raises(ValueError, match="no tasks"):
        MixtureStream([], 1, 0, {"b": 1})


def test_without_weights_nothing_changes() -> None:
    tasks = _tasks(a=9)
    assert task_stream(tasks, 4, 0, {})(2) == TaskStream(tasks, 4, 0)(2)
    assert isinstance(task_stream(tasks, 4, 0, {"a": 1}), MixtureStream)


def test_further_tasks_are_drawn_by_weight_whatever_the_sizes() -> None:
    tasks = _tasks(a=1000, b=100)
    first = Counter(
        tasks[weighted_order(tasks, 1, str(n), {"a": 1, "b": 3})[0]].source for n in range(200)
    )
    assert 125 < first["b"] < 175  # 150 expected; by size it would be 18
    whole = weighted_order(tasks, 1100, "0", {"a": 1, "b": 3})
    assert sorted(whole) == list(range(1100)) and whole[:50] == weighted_order(
        tasks, 50, "0", {"a": 1, "b": 3}
    )


def test_a_source_with_too_few_tasks_for_its_share_is_named() -> None:
    """A step of an asynchronous run must have as many groups as every other."""
    tasks, weights = _tasks(a=5, b=9), {"a": 1.0, "b": 1.0, "c": 3.0}
    assert too_small(tasks, 10, weights) == ""
    assert too_small(tasks, 11, weights) == "a"  # 5.5 is rounded up in some steps
    assert too_small(tasks, 99, {}) == ""


@pytest.mark.parametrize("seed", range(5))
def test_whole_steps_have_one_source_and_keep_the_shares(seed: int) -> None:
    """The shares of 1 and 3 count in steps: 50 and 150 of 200."""
    stream = task_stream(_tasks(a=9, b=30), 8, seed, {"a": 1, "b": 3}, whole_steps=True)
    steps = [stream(step) for step in range(1, 201)]
    assert all(len({task.source for task in step}) == 1 for step in steps)
    assert all(len({task.id for task in step}) == len(step) == 8 for step in steps)
    assert abs(sum(step[0].source == "a" for step in steps) - 50) <= 1


def test_a_step_needs_its_share_of_a_source_rounded_up() -> None:
    tasks = _tasks(a=3, b=30)
    assert least_tasks(tasks, 8, {}) == {"": 8}
    assert least_tasks(tasks, 8, {"a": 1, "b": 2}) == {"a": 3, "b": 6}
    assert least_tasks(tasks, 8, {"a": 1, "b": 2}, whole_steps=True) == {"a": 3, "b": 8}
    assert least_tasks(tasks, 80, {}) == {"": 33}
