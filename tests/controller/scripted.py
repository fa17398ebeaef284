"""Rollouts without an engine, and the collector on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from sixfold.controller.collector import Collector
from sixfold.environment.base import EnvironmentRole, Scorer
from sixfold.event_loop import EventLoop
from sixfold.rollout.base import Choose
from sixfold.types import Group, Task, Trajectory

LOOP = EventLoop()


class ScriptedRollout:
    """A rollout whose episodes end one after the other, task by task, in the order of `episodes`.

    Attributes:
        ended: (task id, sample) of the episodes that have ended.
    """

    version = 0
    samples = 1

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []

    @abstractmethod
    def episodes(self, task: Task, seed: int) -> list[Trajectory]: ...

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        assert scorer is not None
        made = [(task, self.episodes(task, seed)) for task in tasks]
        on_sampled()
        for task, trajectories in made:
            ended: list[Trajectory] = []
            for trajectory in trajectories:
                self.ended.append((task.id, trajectory.sample))
                await scorer.add(task, trajectory)
                ended.append(trajectory)
                if len(ended) < (choose.keep if choose else len(trajectories)):
                    continue
                await scorer.finish(Group(task, list(ended)))
                kept = choose(task, ended) if choose else ended
                if kept is not None:
                    yield Group(task, list(kept))
                    break

    def stats(self) -> dict[str, float]:
        return {}


def collect(
    rollout: Any,
    environment: EnvironmentRole,
    tasks: Sequence[Task],
    seed: int = 0,
    **policies: Any,
) -> tuple[list[Group], dict[str, float]]:
    """Groups and metrics of one step, without the seconds of its phases."""
    collector = Collector(rollout, environment, LOOP, **policies)
    groups = collector.collect(tasks, seed, lambda phase: None)
    return groups, {k: v for k, v in collector.stats().items() if not k.startswith("time/")}
