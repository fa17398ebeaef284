"""Samples that train ahead are as long as those that are sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from sixfold.checks.environment import Environment
from sixfold.controller.asynchronous import AsyncCollector
from sixfold.controller.ledger import Ledger
from sixfold.event_loop import EventLoop
from sixfold.staleness import window_groups
from sixfold.types import Group, Task, Trajectory

PER_STEP, STALENESS, STEPS = 4, 2, 25
RNG = random.Random(0)
TASKS = [Task(str(i), "") for i in range(1000)]
LENGTHS = {task.id: min(300, int(RNG.paretovariate(0.8))) for task in TASKS}
SOLVED = {task.id: RNG.random() < 0.5 for task in TASKS}  # by all samples: equal rewards


class LongTailed:
    """A rollout in which a group takes as many turns of the event loop as it has tokens."""

    version, samples = 0, 2

    async def play(
        self, tasks: Sequence[Task], seed: int, scorer: Any, *given: Any
    ) -> AsyncGenerator[Group, None]:
        (task,) = tasks
        length = LENGTHS[task.id]
        for _ in range(length):
            await asyncio.sleep(0)
        made = [
            Trajectory.one_turn(
                task.id, k, [1], [2] * length, [-1.0] * length, [0] * length, "stop", text=str(k)
            )
            for k in range(self.samples)
        ]
        await scorer.finish(Group(task, made))
        yield Group(task, made)

    def stats(self) -> dict[str, float]:
        return {}


def stream(step: int) -> list[Task]:
    return TASKS[(step - 1) * PER_STEP : step * PER_STEP]


def reward(completion: str, task: Task) -> float:
    return 1.0 if SOLVED[task.id] else float(completion)


@pytest.mark.parametrize("max_rounds", [0, 9])
def test_trained_groups_are_as_long_as_sampled_ones(max_rounds: int) -> None:
    """Long groups are trained late, but all are, and what is skipped does not depend on length."""
    loop = EventLoop()
    ledger = Ledger(PER_STEP, STALENESS, window_groups(PER_STEP, STALENESS, 1.0), STEPS)
    order: list[str] = []
    with Environment([reward]) as environment:
        collector = AsyncCollector(
            LongTailed(), environment, loop, ledger, stream, lambda step: step,
            measure=lambda groups: {"rollout/kept_frac": 1.0}, max_rounds=max_rounds,
        )  # fmt: skip
        skipped = 0.0
        for step in range(STEPS):
            groups = collector.collect(stream(step), step, lambda phase: None)
            order += [group.task.id for group in groups]
            collector.trained()
            if max_rounds:
                skipped += round(PER_STEP / collector.stats()["dynamic/kept_frac"]) - PER_STEP
    loop.close()
    last = max(map(int, order)) + 1
    signal = [task.id for task in TASKS[:last] if not (max_rounds and SOLVED[task.id])]
    assert sorted(order, key=int) == signal  # so the lengths are those that were sampled, too
    assert sorted(LENGTHS[i] for i in order) == sorted(LENGTHS[i] for i in signal)
    assert order != signal and max(LENGTHS[i] for i in order) > 200  # short ones have overtaken
    assert skipped == last - len(signal)
