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
from .dynamic_sampling import Refill
from .rounds import Round, Rounds


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
    """

    rollout: Rollout
    environment: EnvironmentRole
    loop: EventLoop
    choose: Choose | None = None
    refill: Refill | None = None
    greedy: Rollout | None = None
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
        scorer = self.environment.scorer(len(tasks) * self.rollout.samples)
        rounds = Rounds(scorer, on_phase)

        async def play(chosen: Sequence[Task], its_seed: int) -> Round:
            return await rounds.play(self.rollout, chosen, its_seed, self.choose)

        if self.refill is None:
            first = await play(tasks, seed)
            groups, stats = first.groups, first.stats
        else:
            groups, stats = await self.refill.groups(tasks, seed, play)
        if self.greedy is not None:
            alone = await rounds.play(self.greedy, [group.task for group in groups], seed)
            groups, of_greedy = with_baselines(groups, alone.groups)
            stats = stats | of_greedy
        self._stats = stats | rounds.seconds
        return groups


def with_baselines(
    groups: Sequence[Group], greedy: Sequence[Group]
) -> tuple[list[Group], dict[str, float]]:
    """Fill in `Group.greedy`.

    The greedy completion is not one of the group's trajectories, so it is not trained on, and does
    not count in reward metrics, group statistics, staleness and dumps.

    Args:
        groups: groups of the step.
        greedy: scored groups of one greedy completion each, for the same tasks.

    Returns:
        The groups, and the metrics of the cost and reward of the greedy completions.
    """
    filled = [
        replace(group, greedy=alone.trajectories[0])
        for group, alone in zip(groups, greedy, strict=True)
    ]
    return filled, _greedy_stats(greedy)


def _greedy_stats(groups: Sequence[Group]) -> dict[str, float]:
    trajectories = [group.trajectories[0] for group in groups]
    known = [value for group in groups for value in group.rewards if value is not None]
    stats = {
        "rollout/greedy_tokens": float(sum(t.sampled_length for t in trajectories)),
        "rollout/greedy_error_frac": 1 - len(known) / len(trajectories),
    }
    return stats | ({"rollout/greedy_reward": fmean(known)} if known else {})
