"""How fast something happens now, from counts as they come."""

from __future__ import annotations

import time
from math import exp


class Rate:
    """Events a second, each event weighing less as it ages: exp(-age / seconds) / seconds, which a steady stream sums to its rate.

    One thread adds; any may read.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._state = (0.0, 0.0)  # one object: who reads never sees half of a change

    def add(self, count: float, now: float | None = None) -> None:
        """`count` events at this moment. now: seconds of a clock that never goes back."""
        now = time.monotonic() if now is None else now
        self._state = (self.value(now) + count / self._seconds, now)

    def value(self, now: float | None = None) -> float:
        """Events a second; falls to 0 when nothing happens."""
        rate, at = self._state
        return rate * exp((at - (time.monotonic() if now is None else now)) / self._seconds)
