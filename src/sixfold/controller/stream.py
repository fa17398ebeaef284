"""Choose the tasks of each step.

The tasks depend only on the step number and the seed, so there is no cursor to save or restore.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from ..seeds import STEP_BYTES, seed_number
from ..types import Task
from .mixture import MixtureStream

T = TypeVar("T")


class TaskStream(Generic[T]):
    """Endless epochs over the tasks, or over windows of texts. Steps count from 1.

    The order of an epoch depends only on (seed, epoch).

    Args:
        tasks: at least one.
        per_step: prompts per step, capped at the number of tasks.
        seed: seed of the task orders.

    Attributes:
        steps_per_epoch: steps of an epoch.

    Raises:
        ValueError: if there are no tasks.
    """

    def __init__(self, tasks: Sequence[T], per_step: int, seed: int) -> None:
        if not tasks:
            raise ValueError("no tasks to train on")
        self._tasks = tasks
        self._per_step = min(per_step, len(tasks))
        self.steps_per_epoch = len(tasks) // self._per_step
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def __call__(self, step: int) -> list[T]:
        """Tasks of a step, all different.

        If the last tasks of an epoch do not fill a step, they are skipped.
        """
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        chosen = self._order[1][index * self._per_step : (index + 1) * self._per_step]
        return [self._tasks[i] for i in chosen]


def task_stream(
    tasks: Sequence[Task],
    per_step: int,
    seed: int,
    weights: Mapping[str, float],
    whole_steps: bool = False,
) -> TaskStream[Task] | MixtureStream:
    """Function from step number to the tasks of the step.

    Args:
        tasks: at least one.
        per_step: prompts per step.
        seed: seed of the task orders.
        weights: source name to weight. Empty: all tasks have the same chance.
        whole_steps: all prompts of a step come from one source.
    """
    return (
        MixtureStream(tasks, per_step, seed, weights, whole_steps)
        if weights
        else TaskStream(tasks, per_step, seed)
    )


def step_seed(seed: int, step: int) -> int:
    """Sampling seed of a step. A task that recurs in a later epoch gets different noise."""
    return seed_number(f"{seed}/{step}", STEP_BYTES)


def greedy_seed(seed: int) -> int:
    """Seed of greedy completions that are sampled beside samples with this seed.

    They have no noise, but a sample is known by seed, task and number.
    """
    return step_seed(seed, 0)
