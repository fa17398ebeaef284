"""Settings of a simulation, and the expected slowdown of a run that starts again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import checks
from .timing import Timing


@dataclass(frozen=True)
class Failures:
    """How often devices fail, and what a failure costs.

    Attributes:
        device_seconds: mean time between failures of one device, in seconds. Times between failures
            are exponential.
        restart_seconds: time from a failure until work goes on.
        checkpoint_steps: steps between checkpoints. 0: none is written.

    Raises:
        UserError: if the mean time, in seconds, is not finite.
    """

    device_seconds: float
    restart_seconds: float
    checkpoint_steps: int

    def __post_init__(self) -> None:
        checks.positive(**{"mean time between failures": self.device_seconds})

    def rate(self, devices: int) -> float:
        return devices / self.device_seconds


def expected_slowdown(segment: float, *, rate: float, restart: float) -> float:
    """Expected time between two checkpoints, divided by the time without failures.

    `(1 / rate + restart) (exp(rate * segment) - 1) / segment`: a segment starts again until it
    ends without a failure, and none happens during a restart. The formula is that of Daly
    (doi:10.1016/j.future.2004.11.016) with checkpoints that cost nothing. If failures are rare,
    each one costs half a segment and the restart.

    Args:
        segment: seconds of work between two checkpoints.
        rate: failures per second.
        restart: seconds of a restart.

    Returns:
        At least 1. Infinite if no segment will ever end.
    """
    if rate * segment > 700:
        return math.inf
    return (1 / rate + restart) * math.expm1(rate * segment) / segment


@dataclass(frozen=True)
class Settings:
    """What is simulated.

    Attributes:
        topology: "colocated", "disaggregated" or "async".
        steps: steps to measure, after those that fill the pipeline.
        staleness: async only: most weight versions between the first token of a sample and the
            weights that it trains.
        attempts: dynamic sampling: how often a place of the batch is sampled at most until the
            rewards of its group differ. 1: off.
        failures: failures of devices. None: none fails.
    """

    topology: str
    prompts: int
    samples: int
    steps: int
    staleness: int
    attempts: int
    failures: Failures | None
    seed: int

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
