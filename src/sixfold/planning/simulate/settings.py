"""Settings of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from .. import checks
from ..step_time import TOPOLOGIES
from .failures import Failures
from .timing import Timing


@dataclass(frozen=True)
class Settings:
    """What is simulated.

    Attributes:
        topology: "colocated", "disaggregated" or "async".
        prompts: prompts per step.
        samples: samples per prompt.
        steps: steps to measure, after those that fill the pipeline.
        staleness: async only: most weight versions between the first token of a sample and the
            weights that it trains.
        attempts: dynamic sampling: how often a place of the batch is sampled at most until the
            rewards of its group differ. 1: off.
        failures: failures of devices. None: none fails.
        seed: seed of all random numbers.

    Raises:
        UserError: if a word is unknown or a number is out of range.
    """

    topology: str
    prompts: int
    samples: int
    steps: int
    staleness: int
    attempts: int
    failures: Failures | None
    seed: int

    def __post_init__(self) -> None:
        checks.one_of("topology", self.topology, TOPOLOGIES)
        checks.whole(
            prompts=self.prompts,
            samples=self.samples,
            steps=self.steps,
            attempts=self.attempts,
        )
        checks.whole(0, staleness=self.staleness, seed=self.seed)

    @property
    def bound(self) -> int:
        """Bound of the staleness of this topology."""
        return {"colocated": 0, "disaggregated": 1, "async": self.staleness}[self.topology]

    @property
    def barrier(self) -> bool:
        """All devices wait for a weight sync, which waits for the engines to be empty."""
        return self.topology != "async"

    @property
    def filling(self) -> int:
        """First steps, which fill the pipeline and are not measured."""
        return self.bound + 1

    def devices(self, timing: Timing) -> int:
        """All devices. Colocated roles share theirs."""
        apart = 0 if self.topology == "colocated" else timing.sampling_devices
        return timing.training_devices + apart
