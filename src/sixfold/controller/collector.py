"""The collector: scored groups of a step, from rollout and environment.

The rollout plays episodes and scores each as it ends. The collector decides what is played:
dynamic sampling (`dynamic_sampling.py`), dynamic K (`oversample.py`) and the greedy baselines of
ReMax (arXiv:2310.10505) are its policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from ..environment.base import EnvironmentRole
from ..event_loop import EventLoop
from ..rollout.base import Choose, Rollout
from ..types import Group, Task
from .dead_letters import DeadLetters
from .dynamic_sampling import Refill
from .rounds import Round, Rounds, joined


class Collects(Protocol):
    """Hands out the scored groups of each step."""

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """The groups of the next step. For the arguments see `Collector`."""
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last `collect`."""
        ...


@dataclass
class Collector:
    """Collects the scored groups of a step.

    Attributes:
        rollout: plays the episodes that train.
        environment: scores them.
        loop: event loop of the run.
        choose: dynamic K, or None.
        refill: dynamic sampling, or None.
        greedy: plays one greedy episode per task that reaches the step, as its baseline. None if
            the method needs none.
        dead: prompts that were set aside.
        observe: called with the scored groups of every round, also those that are replaced.
    """

    rollout: Rollout
    environment: EnvironmentRole
    loop: EventLoop
    choose: Choose | None = None
    refill: Refill | None = None
    greedy: Rollout | None = None
    dead: DeadLetters = field(default_factory=DeadLetters)
    observe: Callable[[Sequence[Group]], None] = lambda groups: None
    _stats: dict[str, float] = field(default_factory=dict)

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """One scored group per task.

        Args:
            tasks: tasks of the step.
            seed: seed of the step.
            on_phase: called with "rollout" and "environment" as these phases start.
        """
        return self.loop.run(self._collect(tasks, seed, on_phase))

    def stats(self) -> dict[str, float]:
        """Metrics of the last `collect`, with the seconds of sampling and of waiting for checks."""
        return self._stats

    async def _collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        expected = len(tasks) * self.rollout.samples
        rounds = Rounds(self.environment.scorer(expected), on_phase)

        async def play(chosen: Sequence[Task], its_seed: int, fill: bool = False) -> Round:
            played: list[Round] = []

            async def attempt(some: Sequence[Task], earlier: int) -> list[Group]:
                scorer = self.environment.scorer(expected) if earlier else None
                played.append(await rounds.play(self.rollout, some, its_seed, self.choose, scorer))
                return played[-1].groups

            groups = await (
                self.dead.fill(chosen, its_seed, attempt)
                if fill
                else self.dead.survivors(chosen, attempt)
            )
            self.observe(groups)
            return joined(groups, played)

        first = await play(tasks, seed, fill=True)
        groups, stats = first.groups, first.stats
        if self.refill is not None:
            taken = {task.id for task in tasks} | self.dead.ids
            groups, stats = await self.refill.groups(first, taken, seed, play)
        if self.greedy is not None:
            alone = await rounds.play(self.greedy, [group.task for group in groups], seed)
            groups = with_baselines(groups, alone.groups)
            stats = stats | greedy_stats(groups)
        self._stats = stats | rounds.seconds | self.dead.take()
        return groups


def with_baselines(groups: Sequence[Group], greedy: Sequence[Group]) -> list[Group]:
    """The groups, with `Group.greedy` filled in.

    The greedy completion is not one of the group's trajectories, so it is not trained on, and does
    not count in reward metrics, group statistics, staleness and dumps.

    Args:
        groups: groups of the step.
        greedy: scored groups of one greedy completion each, for the same tasks.
    """
    return [
        replace(group, greedy=alone.trajectories[0])
        for group, alone in zip(groups, greedy, strict=True)
    ]


def greedy_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the cost and reward of the greedy completions of groups."""
    trajectories = [group.greedy for group in groups if group.greedy]
    known = [t.total_reward for t in trajectories if t.total_reward is not None]
    stats = {
        "rollout/greedy_tokens": float(sum(t.sampled_length for t in trajectories)),
        "rollout/greedy_error_frac": 1 - len(known) / len(trajectories),
    }
    return stats | ({"rollout/greedy_reward": fmean(known)} if known else {})
