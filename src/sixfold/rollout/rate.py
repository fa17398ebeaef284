"""Current rate of events, computed from counts."""

from __future__ import annotations

import time
from math import exp

SECONDS = 10.0
"""Time constant of a rate."""


class Rate:
    """Events per second, as an exponentially weighted sum.

    An event has the weight exp(-age / SECONDS) / SECONDS, so the sum over a steady stream equals
    its rate. One thread may add events; any thread may read the rate.
    """

    def __init__(self) -> None:
        self._state = (0.0, 0.0)  # one tuple: a reader in another thread never sees half an update

    def add(self, count: float, now: float | None = None) -> None:
        """Add `count` events at time `now`, in seconds of a monotonic clock."""
        now = time.monotonic() if now is None else now
        self._state = (self.value(now) + count / SECONDS, now)

    def value(self, now: float | None = None) -> float:
        """Events per second at time `now`. It decays to 0 without events."""
        rate, at = self._state
        return rate * exp((at - (time.monotonic() if now is None else now)) / SECONDS)
