"""Which tasks a step trains on: each once an epoch, the same for the same seed, no state
to lose.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.controller.stream import TaskStream, step_seed
from sixfold.types import Task


def _tasks(n: int) -> list[Task]:
    return [Task(str(i), "?") for i in range(n)]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_no_task_twice_in_an_epoch_and_all_but_a_remainder_seen(
    count: int, per_step: int, seed: int
) -> None:
    stream = TaskStream(_tasks(count), per_step, seed)
    size = min(per_step, count)
    steps = count // size
    for epoch in range(2):
        seen = [t.id for step in range(steps) for t in stream(epoch * steps + step + 1)]
        assert len(seen) == steps * size == len(set(seen))
        assert count - len(seen) < size


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_step_is_a_function_of_the_step_alone(steps: list[int]) -> None:
    """Whatever steps were asked for before: a resumed run sees the tasks that the uninterrupted run
    saw.
    """
    used = TaskStream(_tasks(17), 4, seed=3)
    for step in steps:
        assert used(step) == TaskStream(_tasks(17), 4, seed=3)(step)


def test_epochs_and_seeds_differ_in_order() -> None:
    first, second = (
        [t.id for s in range(e * 5 + 1, e * 5 + 6) for t in TaskStream(_tasks(20), 4, 0)(s)]
        for e in (0, 1)
    )
    assert sorted(first) == sorted(second) and first != second
    assert [t.id for t in TaskStream(_tasks(20), 4, 1)(1)] != first[:4]


def test_fewer_tasks_than_a_step_wants() -> None:
    assert sorted(t.id for t in TaskStream(_tasks(3), 8, 0)(5)) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="no tasks"):
        TaskStream([], 8, 0)


def test_the_first_step_is_pinned() -> None:
    """Another order would silently break the promise that an old run can be made again."""
    assert [t.id for t in TaskStream(_tasks(10), 4, 0)(1)] == ["1", "0", "2", "4"]
    assert step_seed(0, 1) == 10711896783681533


def test_step_seeds_are_all_different_and_fit_a_signed_64_bit_integer() -> None:
    seeds = [step_seed(seed, step) for seed in range(20) for step in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2**63
    assert step_seed(1, 11) != step_seed(11, 1)
