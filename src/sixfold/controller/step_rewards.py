"""Guard of a method that trains on rewards of steps: a step without any does not pass unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..types import Group, Task
from .collector import Collects

_NONE = "algorithm.advantage = 'process', but no trajectory has a reward of a step or turn"


@dataclass
class StepRewardsCollector:
    """A collector that looks for rewards of steps and turns in the groups of every step.

    Attributes:
        inner: collects the groups.
        warn: gets a warning if a step has none.
        expected: the rewards are functions, and a run that has not seen one stops. The turns of an
            environment may all earn 0.
    """

    inner: Collects
    warn: Callable[[str], None]
    expected: bool

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """As `Collects.collect`.

        Raises:
            UserError: if no known reward has steps, and none had before.
        """
        groups = self.inner.collect(tasks, seed, on_phase)
        known = [t for g in groups for t in g.trajectories if t.total_reward is not None]
        if any(t.step_rewards for t in known):
            self.expected = False
        elif known and self.expected:
            raise UserError(
                f"{_NONE}. Let a function of environment.rewards with a weight other than 0 return"
                " Grade(value, verdict, steps=[(end, reward), ...]), or use another"
                " algorithm.advantage"
            )
        elif known:
            self.warn(f"{_NONE}: this step trains on the final rewards alone")
        return groups

    def stats(self) -> dict[str, float]:
        """As `Collects.stats`."""
        return self.inner.stats()
