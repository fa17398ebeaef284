"""Failures of devices: settings, and the expected slowdown of a run that starts again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import checks


@dataclass(frozen=True)
class Failures:
    """How often devices fail, and what a failure costs.

    Attributes:
        device_seconds: mean time between failures of one device, in seconds. Times between failures
            are exponential.
        restart_seconds: time from a failure until work goes on.
        checkpoint_steps: steps between checkpoints. 0: none is written.

    Raises:
        UserError: if a number is out of range.
    """

    device_seconds: float
    restart_seconds: float
    checkpoint_steps: int

    def __post_init__(self) -> None:
        checks.positive(**{"mean time between failures": self.device_seconds})
        checks.not_negative(restart_seconds=self.restart_seconds)
        checks.whole(0, checkpoint_steps=self.checkpoint_steps)

    def rate(self, devices: int) -> float:
        """Failures per second of a number of devices."""
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

    Raises:
        UserError: if a number is out of range.
    """
    checks.positive(segment=segment, rate=rate)
    checks.not_negative(restart=restart)
    if rate * segment > 700:
        return math.inf
    return (1 / rate + restart) * math.expm1(rate * segment) / segment
