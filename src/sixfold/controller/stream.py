"""Which tasks a step trains on: a pure function of the step, so there is no cursor to save and none to restore wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from ..types import Task
from .mixture import MixtureStream


class TaskStream:
    """Endless epochs over the tasks, each in an order of its own drawn from (seed, epoch). Steps count from 1."""

    def __init__(self, tasks: Sequence[Task], per_step: int, seed: int) -> None:
        if not tasks:
            raise ValueError("no tasks to train on")
        self._tasks = tasks
        self._per_step = min(per_step, len(tasks))
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def __call__(self, step: int) -> list[Task]:
        """The tasks of a step, all different. An epoch's last few, too few for a step, are left to the next epochs."""
        steps_per_epoch = len(self._tasks) // self._per_step
        epoch, index = divmod(step - 1, steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        chosen = self._order[1][index * self._per_step : (index + 1) * self._per_step]
        return [self._tasks[i] for i in chosen]


def task_stream(tasks: Sequence[Task], per_step: int, seed: int, weights: Mapping[str, float]) -> Callable[[int], list[Task]]:
    """What maps a step to its tasks. weights: by source; empty: all tasks are drawn alike."""
    return MixtureStream(tasks, per_step, seed, weights) if weights else TaskStream(tasks, per_step, seed)


def step_seed(seed: int, step: int) -> int:
    """The sampling seed of a step: a task seen again in a later epoch gets fresh noise."""
    return int.from_bytes(blake2b(f"{seed}/{step}".encode(), digest_size=7).digest(), "little")
