"""Choose the tasks of each step from several sources, drawn by weight.

The tasks of a step depend only on (seed, step), as in `stream.TaskStream`. No state is saved, and a
resumed run draws the same tasks as an uninterrupted one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..types import Task

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio are spread evenly over [0, 1).

So a source with 0.3 prompts per step gets one in every 3 or 4 steps.
"""


@dataclass
class _Source:
    """Endless epochs over the tasks of one source.

    Args:
        name: name of the source. Each source has its own task order per epoch.
        tasks: at least one.
        epoch: epoch of the next task.
        index: position of the next task in the order of that epoch.
    """

    name: str
    tasks: list[Task]
    epoch: int = 0
    index: int = 0

    def take(self, wanted: int) -> tuple[int, int, int]:
        """Advance by `wanted` tasks, all different.

        If the epoch has fewer than `wanted` tasks left, they are skipped and the next epoch starts.

        Returns:
            (epoch, start, end) of the range.
        """
        wanted = min(wanted, len(self.tasks))
        if self.index + wanted > len(self.tasks):
            self.epoch, self.index = self.epoch + 1, 0
        start, self.index = self.index, self.index + wanted
        return self.epoch, start, self.index

    def read(self, seed: int, epoch: int, start: int, end: int) -> list[Task]:
        """Tasks of the range [start, end) in the order of an epoch."""
        order = list(range(len(self.tasks)))
        random.Random(f"{seed}/{self.name}/{epoch}").shuffle(order)
        return [self.tasks[i] for i in order[start:end]]


class MixtureStream:
    """Endless epochs over several sources, each with its share of every step. Steps count from 1.

    The prompts of a source in a step are its share, rounded down or up. Over many steps they
    average to the share. A source with fewer tasks than its share gives all of them, and the step
    is smaller.

    Args:
        tasks: tasks of all sources. `Task.source` names the source.
        per_step: prompts per step.
        seed: seed of the task orders and of the rounding.
        weights: source name to weight. Sources without tasks are left out.
        whole_steps: all prompts of a step come from one source. Its share counts in steps.

    Attributes:
        steps_per_epoch: 0. Each source has its own epochs.

    Raises:
        ValueError: if there are no tasks, or if the source of a task has no weight.
    """

    steps_per_epoch = 0

    def __init__(
        self,
        tasks: Sequence[Task],
        per_step: int,
        seed: int,
        weights: Mapping[str, float],
        whole_steps: bool = False,
    ) -> None:
        self._unit = per_step if whole_steps else 1
        self._per_step = per_step // self._unit
        self._seed = seed
        self._by_name = _by_source(tasks, weights)
        total = sum(weights[name] for name in self._by_name)
        shares = (self._per_step * weights[name] / total for name in self._by_name)
        ends = list(accumulate(shares))
        self._ends = ends[:-1]
        self._offset = random.Random(f"{seed}/mixture").random()
        self._restart()

    def __call__(self, step: int) -> list[Task]:
        """Tasks of a step, all different, in an order drawn for the step."""
        if step <= self._step:
            self._restart()
        while self._step < step:
            self._step += 1
            taken = [
                source.take(count)
                for source, count in zip(self._sources, self._shares(self._step), strict=True)
            ]
        chosen = [
            task
            for source, (epoch, start, end) in zip(self._sources, taken, strict=True)
            for task in source.read(self._seed, epoch, start, end)
        ]
        random.Random(f"{self._seed}/step/{step}").shuffle(chosen)
        return chosen

    def _restart(self) -> None:
        self._step = 0
        self._sources = [_Source(name, tasks) for name, tasks in self._by_name.items()]

    def _shares(self, step: int) -> list[int]:
        """Prompts per source in a step. Systematic sampling makes them add up to `per_step`."""
        offset = (self._offset + step * _GOLDEN) % 1.0
        marks = [
            0,
            *(min(math.floor(end + offset), self._per_step) for end in self._ends),
            self._per_step,
        ]
        return [self._unit * (high - low) for low, high in pairwise(marks)]


def weighted_order(
    tasks: Sequence[Task], count: int, seed: str, weights: Mapping[str, float]
) -> list[int]:
    """Indices of `count` tasks, drawn without replacement.

    A task is drawn with weight w / n: w is the weight of its source, n the number of tasks in it.
    So the chance of a source does not depend on its size (Efraimidis and Spirakis, 2006: the
    largest of u^(1/w)).

    Args:
        tasks: tasks to draw from.
        count: number of tasks to draw, at most `len(tasks)`.
        seed: seed of the draw.
        weights: source name to weight. Empty: all tasks have the same chance.
    """
    rng = random.Random(seed)
    if not weights:
        return rng.sample(range(len(tasks)), count)
    sizes = {name: len(found) for name, found in _by_source(tasks, weights).items()}
    keys = [
        math.log(1 - rng.random()) * sizes[task.source] / weights[task.source] for task in tasks
    ]
    return sorted(range(len(tasks)), key=keys.__getitem__, reverse=True)[:count]


def too_small(tasks: Iterable[Task], per_step: int, weights: Mapping[str, float]) -> str:
    """Name of a source with fewer tasks than its share of a step, rounded up. "": there is none."""
    if not weights:
        return ""
    found = _by_source(tasks, weights)
    total = sum(weights[name] for name in found)
    return next((n for n in found if len(found[n]) < math.ceil(per_step * weights[n] / total)), "")


def least_tasks(
    tasks: Sequence[Task], per_step: int, weights: Mapping[str, float], whole_steps: bool = False
) -> dict[str, int]:
    """Tasks of each source that a step may need: its share rounded up, or all if there are fewer.

    Args:
        tasks: tasks of all sources.
        per_step: prompts per step.
        weights: source name to weight. Empty: the only name is "", which stands for all tasks.
        whole_steps: as in `MixtureStream`.
    """
    if not weights:
        return {"": min(per_step, len(tasks))}
    found = _by_source(tasks, weights)
    total = sum(weights[name] for name in found)
    return {
        name: min(
            per_step if whole_steps else math.ceil(per_step * weights[name] / total), len(own)
        )
        for name, own in found.items()
    }


def _by_source(tasks: Iterable[Task], weights: Mapping[str, float]) -> dict[str, list[Task]]:
    """Tasks by source, in the order of `weights`. Sources without tasks are left out.

    Raises:
        ValueError: if there are no tasks, or if the source of a task has no weight.
    """
    found: dict[str, list[Task]] = {name: [] for name in weights}
    for task in tasks:
        if task.source not in found:
            raise ValueError(f"task {task.id} is of source {task.source!r}, which has no weight")
        found[task.source].append(task)
    present = {name: group for name, group in found.items() if group}
    if not present:
        raise ValueError("no tasks to train on")
    return present
