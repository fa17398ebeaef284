"""The collector: scored groups of a step, from rollout and environment.

The rollout plays episodes and scores each as it ends. The collector decides what is played:
dynamic sampling (`refill.py`), dynamic K (`oversample.py`) and greedy baselines (`greedy.py`) are
its policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..environment.base import EnvironmentRole
from ..event_loop import EventLoop
from ..rollout.base import Choose, Rollout
from ..types import Group, Task
from .greedy import with_baselines
from .refill import Refill
from .rounds import Round, Rounds


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
