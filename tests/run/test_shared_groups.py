"""Several ranks sample ahead, each its share: whatever finishes when, all train the same groups."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from sixfold.controller.asynchronous import AsyncCollector
from sixfold.controller.ledger import Ledger
from sixfold.controller.schedule import ScheduledGroup
from sixfold.errors import UserError
from sixfold.event_loop import BackgroundLoop
from sixfold.ranks import Ranks
from sixfold.run.shared_groups import RankLedgers, SharedCollector
from sixfold.staleness import largest_age, window_groups
from sixfold.types import Group, Task
from tests.made_trajectories import from_mask
from tests.thread_ranks import on_threads

PER_STEP, STEPS, SIZE, STALENESS = 5, 12, 3, 2
OWN = [2, 2, 1]
"""Groups of each rank in a step."""
WINDOWS = [window_groups(own, STALENESS, 1.0) for own in OWN]


class Drawn:
    """A rollout whose groups end in an order drawn at random."""

    samples = 1

    def __init__(self, rng: random.Random, failing: str) -> None:
        self._rng = rng
        self._failing = failing

    async def play(self, tasks: Sequence[Task], *given: Any) -> AsyncGenerator[Group, None]:
        (task,) = tasks
        for _ in range(self._rng.randrange(40)):
            await asyncio.sleep(0)
        if task.id == self._failing:
            raise ValueError("no episode")
        yield Group(task, [from_mask(task.id, 0, [1, 2], 1, [False, True])])


class Scorers:
    """An environment that scores nothing."""

    def scorer(self, expected: int) -> None: ...


def tasks_of(step: int) -> list[Task]:
    return [Task(f"{(step - 1) * PER_STEP + i}", "") for i in range(PER_STEP)]


def ledgers(rank: int, steps: int = STEPS) -> RankLedgers:
    made = [Ledger(own, STALENESS, w, steps) for own, w in zip(OWN, WINDOWS, strict=True)]
    return RankLedgers(made, rank)


def collector(ranks: Ranks, own: RankLedgers, loop: Any, failing: str = "") -> SharedCollector:
    environment: Any = Scorers()
    inner = AsyncCollector(
        rollout=Drawn(random.Random(ranks.rank), failing),  # type: ignore[arg-type]
        environment=environment,
        loop=loop,
        ledger=own.own,
        tasks=lambda step: tasks_of(step)[ranks.rank :: SIZE],
        seed=lambda step: step,
        measure=lambda groups: {"rollout/tokens": 1.0, "rollout/tok_s": 2.0},
    )
    every = {task.id: task for step in range(1, STEPS + 9) for task in tasks_of(step)}
    return SharedCollector(inner, own, every, ranks)


Steps = list[list[tuple[ScheduledGroup, str]]]


def test_all_ranks_train_every_group_once_and_none_too_old() -> None:
    """R-190. The state of every rank resumes all of them."""

    def work(ranks: Ranks) -> tuple[Steps, dict[str, Any], dict[str, float]]:
        own, found, loop = ledgers(ranks.rank), Steps(), BackgroundLoop()
        try:
            made = collector(ranks, own, loop)
            for step in range(1, STEPS + 1):
                if step == 6:  # a resume
                    state = own.state()
                    made.stop()
                    own = ledgers(ranks.rank)
                    own.load(state)
                    made = collector(ranks, own, loop)
                groups = made.collect(tasks_of(step), step, lambda phase: None)
                found.append([(s, g.task.id) for s, g in zip(made.scheduled, groups, strict=True)])
                made.trained()
            return found, own.state(), made.stats()
        finally:
            loop.close()

    (found, state, stats), *others = on_threads(SIZE, work)
    for other, its_state, its_stats in others:
        assert other == found and its_state == state
        assert its_stats["async/age_max"] == stats["async/age_max"]
    trained = [one.number for step in found for one, _ in step]
    assert sorted(trained) == list(range(PER_STEP * STEPS)) and trained != sorted(trained)
    bounds = [largest_age(own, STALENESS, w) for own, w in zip(OWN, WINDOWS, strict=True)]
    for ended, step in enumerate(found):
        assert [one.number % PER_STEP % SIZE for one, _ in step].count(0) == OWN[0]
        for one, task in step:
            assert task == str(one.number)
            assert 0 <= ended - one.begun <= bounds[one.number % PER_STEP % SIZE]
    assert stats["rollout/tokens"] == 3.0 and stats["async/running"] == 0.0


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    def work(ranks: Ranks) -> None:
        loop = BackgroundLoop()
        try:
            made = collector(ranks, ledgers(ranks.rank), loop, failing="1")
            for step in range(1, 5):
                made.collect(tasks_of(step), step, lambda phase: None)
                made.trained()
        finally:
            loop.close()

    texts = [str(error) for error in on_threads(SIZE, work)]
    assert texts[1] == "no episode"
    assert texts[0] == texts[2] == "rank 1 failed: ValueError: no episode"


def test_a_resume_needs_as_many_ranks() -> None:
    state = ledgers(0).state()
    fewer = RankLedgers([Ledger(PER_STEP, STALENESS, 1, STEPS)], 0)
    with pytest.raises(UserError, match="resume it with 3 ranks"):
        fewer.load(state)
