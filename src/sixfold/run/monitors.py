"""What watches the metrics of a run: alarms, and the steps with the best checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.best import BestSteps
from ..checkpointable import Checkpointable, WithoutTensors
from ..evaluation.divergence import Divergence
from ..report.alarms import Alarms
from ..report.learning import Learning
from ..report.reward_drift import RewardDrift


@dataclass
class Monitors:
    """Watch the metrics of RL.

    Attributes:
        best: steps with the best held-out accuracy.
        alarms: figures that are out of range.
        divergence: reward that rises while held-out accuracy falls.
        learning: whether anything is learned.
        drift: learned rewards whose mean drifts.
    """

    best: BestSteps
    alarms: Alarms
    divergence: Divergence = field(default_factory=Divergence)
    learning: Learning = field(default_factory=Learning)
    drift: RewardDrift = field(default_factory=RewardDrift)

    def start(self, before: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
        """Start with the evaluation before RL, and the steps before a resume.

        Args:
            before: record of the evaluation. Empty if there was none.
            earlier: lines of metrics.jsonl.
        """
        self.learning = Learning((before["accuracy"], *before["interval"]) if before else None)
        self.learning.replay(earlier)
        self.drift.replay(earlier)
        self.best.replay(earlier)

    def components(self) -> dict[str, Checkpointable]:
        """Monitors whose state a checkpoint stores. The others read the metrics file again."""
        return {
            "alarms": WithoutTensors(self.alarms),
            "divergence": WithoutTensors(self.divergence),
        }
