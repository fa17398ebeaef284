"""Alarm for reward hacking: training reward rises while held-out accuracy has clearly fallen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .metric import Value
from .numbers import percent


@dataclass
class Divergence:
    """Remembers the best evaluation so far, the one whose interval has the highest lower end.

    Attributes:
        low: lower end of its 95% interval.
        step: its step.
        ema: training reward (reward/ema) at that step.
    """

    low: float = -1.0
    step: int = 0
    ema: float = 0.0

    def state(self) -> dict[str, Any]:
        """The state, JSON-serialisable."""
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.low, self.step, self.ema = state["low"], state["step"], state["ema"]

    def look(self, step: int, ema: float | None, metrics: Mapping[str, Value]) -> str | None:
        """Warning line if held-out accuracy has fallen while the training reward rose.

        This is the case if the 95% interval lies wholly below the best one, and reward/ema is
        higher than at the best evaluation.

        Args:
            step: step of the evaluation.
            ema: reward/ema now. None: not measured.
            metrics: has heldout/low and heldout/high.
        """
        low, high = metrics["heldout/low"], metrics["heldout/high"]
        if ema is None or not isinstance(low, float) or not isinstance(high, float):
            return None
        if low >= self.low:
            self.low, self.step, self.ema = low, step, ema
            return None
        if high >= self.low or ema <= self.ema:
            return None
        return (
            f"held-out accuracy fell from at least {percent(self.low)} at step {self.step} to at"
            f" most {percent(high)}, while the training reward rose from {self.ema:.3f} to"
            f" {ema:.3f}: the policy may be exploiting the checker. Read the samples in the report."
        )
