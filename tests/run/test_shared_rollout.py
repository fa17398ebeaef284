"""What ranks exchange after they have played their share of a step: groups, checks and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.environment.base import Scorer
from sixfold.errors import UserError
from sixfold.ranks import OtherRankFailed, Ranks
from sixfold.rollout.base import Choose
from sixfold.run.shared_rollout import SharedRollout
from sixfold.types import Group, Task, Trajectory
from tests.thread_ranks import on_threads

TASKS = [Task(str(i), "q") for i in range(8)]


def graded(completion: str, task: Task) -> float:
    """Half of the checks fail."""
    if int(task.id) % 4 < 2:
        raise ConnectionError("judge is down")
    return 1.0


class Inner:
    """A rollout that plays and scores one sample per task."""

    samples = 1
    version = 0

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def stats(self) -> dict[str, float]:
        return {"rollout/tok_s": 1.0, "rollout/tokens": 1.0}

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        self._before()
        for task in tasks:
            sampled = Trajectory.one_turn(task.id, 0, [1], [2], [-1.0], [0], "stop", text="t")
            group = Group(task, [sampled])
            if scorer:
                await scorer.finish(group)
            yield group


def played(ranks: Ranks, budget: float, before: Callable[[], None] = lambda: None) -> list[Group]:
    """The groups of a step, scored within an error budget."""

    async def all_groups() -> list[Group]:
        with Environment([graded], error_budget=budget) as environment:
            scorer = environment.scorer(len(TASKS))
            shared = SharedRollout(Inner(before), ranks)
            return [group async for group in shared.play(TASKS, 0, scorer)]

    return asyncio.run(all_groups())


def test_all_ranks_get_all_groups_in_the_order_of_the_tasks() -> None:
    for groups in on_threads(3, lambda ranks: played(ranks, budget=0.5)):
        assert [group.task.id for group in groups] == [task.id for task in TASKS]
        failed = [group.trajectories[0].reward.value is None for group in groups]
        assert failed == [int(task.id) % 4 < 2 for task in TASKS]


def test_the_error_budget_counts_the_checks_of_all_ranks() -> None:
    """Each rank of two has 2 failed checks of 8, which its own budget would allow."""
    for budget, allowed in ((0.5, True), (0.3, False)):
        for found in on_threads(2, lambda ranks, budget=budget: played(ranks, budget)):
            assert isinstance(found, list) == allowed
            if not allowed:
                assert isinstance(found, RewardBudgetExceeded)
                said = str(found)
                assert "3 of 8" in said or "4 of 8" in said, said
                assert "environment.error_budget = 0.3" in said and "judge is down" in said


def _fails(ranks: Ranks, error: Exception) -> tuple[Exception, bool]:
    def before() -> None:
        if ranks.rank == 1:
            raise error

    try:
        played(ranks, 1.0, before)
    except Exception as raised:  # noqa: BLE001  the caller looks at it
        return raised, ranks.agreed_on(raised)
    raise AssertionError("nothing was raised")


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    bug, mistake = ValueError("a bug"), UserError("data.path: no such file")
    kinds: list[tuple[Exception, Any]] = [(bug, OtherRankFailed), (mistake, UserError)]
    for error, kind in kinds:
        (other, known), (own, own_known) = on_threads(2, lambda r, e=error: _fails(r, e))
        assert own is error and type(other) is kind
        assert str(other).startswith("rank 1") and str(error) in str(other)
        assert known and own_known


def test_an_error_that_only_one_rank_has_is_not_agreed_on() -> None:
    assert on_threads(2, lambda ranks: ranks.agreed_on(ValueError("a bug"))) == [False, False]
