"""Find the steps with the best held-out accuracy, whose checkpoints are kept. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .listing import age

METRIC = "heldout/accuracy"


class BestSteps:
    """Held-out accuracy of each evaluated step.

    It is not part of a checkpoint: a resumed run reads it from its metrics file.

    Args:
        count: number of best checkpoints to keep (`checkpoint.keep_best`). 0: none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._accuracy: dict[int, float] = {}

    def observe(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Record the accuracy of a step, if it was evaluated.

        Returns:
            True if the step is among the best `count` so far.
        """
        accuracy = metrics.get(METRIC)
        if not isinstance(accuracy, float):
            return False
        self._accuracy[step] = accuracy
        return step in self._best_first()[: self._count]

    @property
    def highest(self) -> float:
        """Highest accuracy. 0 if there was no evaluation."""
        return max(self._accuracy.values(), default=0.0)

    @property
    def since(self) -> int:
        """Number of evaluations after the best one. 0 if there was none."""
        best = self._best_first()[:1]
        return sum(step > best[0] for step in self._accuracy) if best else 0

    def replay(self, lines: Iterable[Mapping[str, object]], until: float = math.inf) -> None:
        """Record the steps of an earlier process, up to one, from lines of its metrics file."""
        for metrics in lines:
            step = metrics.get("step")
            if isinstance(step, int | float) and step <= until:
                self.observe(int(step), metrics)

    def among(self, checkpoints: Sequence[Path]) -> list[Path]:
        """The checkpoints to keep, the best one first. Of equal ones, the earlier comes first."""
        by_step = {age(path)[1]: path for path in checkpoints if path.name.startswith("step-")}
        return [by_step[step] for step in self._best_first() if step in by_step][: self._count]

    def record(self, checkpoints: Sequence[Path]) -> dict[str, object]:
        """Entry of summary.json about the best checkpoint and its accuracy. Empty without one."""
        if not (best := self.among(checkpoints)[:1]):
            return {}
        accuracy = self._accuracy[age(best[0])[1]]
        found = {"checkpoint": f"checkpoints/{best[0].name}", METRIC: accuracy}
        return {"best_checkpoint": found}

    def _best_first(self) -> list[int]:
        """Evaluated steps from the best to the worst."""
        return sorted(self._accuracy, key=lambda step: (-self._accuracy[step], step))
