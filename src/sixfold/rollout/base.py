"""Contract of rollouts: from tasks to a stream of groups of K scored trajectories."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from ..environment.base import Scorer
from ..types import Group, Task, Trajectory


class Choose(Protocol):
    """Chooses the trajectories of a group before all samples of its task have ended."""

    @property
    def keep(self) -> int:
        """Trajectories of a group. It is called once as many have ended."""
        ...

    def __call__(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        """The trajectories of the group. The task's other samples are then cancelled.

        Args:
            task: the task.
            ended: scored trajectories, the shortest first. Ties are in sample order.

        Returns:
            None to wait for one more. Not allowed once all samples of the task have ended.
        """
        ...


class Rollout(Protocol):
    """Plays episodes with the current weights of the sampler.

    The trajectories are a function of (weights, tasks, seed) and of what the environment answers.
    """

    @property
    def samples(self) -> int:
        """Episodes per task."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that sample."""
        ...

    def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """Play all episodes of the tasks concurrently.

        Args:
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            scorer: scores every trajectory as it ends. None: rewards stay as the environment set
                them.
            choose: ends a group early. None: a group has all samples of its task, in sample order.
            on_sampled: called once, when the last token has been sampled.

        Yields:
            One group per task, as soon as it is complete.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last `play`."""
        ...


async def groups_in_order(
    stream: AsyncGenerator[Group, None], tasks: Sequence[Task]
) -> list[Group]:
    """All groups of a stream, in the order of the tasks."""
    async with aclosing(stream):
        found = {group.task.id: group async for group in stream}
    return [found[task.id] for task in tasks]
