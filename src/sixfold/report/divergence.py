"""The alarm for reward hacking: the training reward still rises while the held-out figure has fallen for certain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .schema import Value


@dataclass
class Divergence:
    """Remembers the best evaluation so far: its lower end, its step, and the training reward then."""

    low: float = -1.0
    step: int = 0
    ema: float = 0.0

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON."""
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; an empty one leaves everything as it is."""
        if state:
            self.low, self.step, self.ema = state["low"], state["step"], state["ema"]

    def look(self, step: int, ema: float | None, metrics: Mapping[str, Value]) -> str | None:
        """A line of warning when the 95 % interval now lies wholly under the best one's while reward/ema is higher than it was then."""
        low, high = metrics["heldout/low"], metrics["heldout/high"]
        if ema is None or not isinstance(low, float) or not isinstance(high, float):
            return None
        if low >= self.low:
            self.low, self.step, self.ema = low, step, ema
            return None
        if high >= self.low or ema <= self.ema:
            return None
        return (
            f"held-out accuracy is at most {high:.1%} and was at least {self.low:.1%} at step {self.step}, while the training reward rose "
            f"from {self.ema:.3f} to {ema:.3f}: the policy may be exploiting the checker; read the samples in the report"
        )
