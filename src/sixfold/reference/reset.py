"""Copy the policy into the reference every N steps, or when held-out accuracy stagnates.

On stagnation ProRL (arXiv:2505.24864, section 2.3.1) also resets the optimizer. By then the KL term
holds the policy at its old position, and the moments keep its old direction.
"""

from __future__ import annotations

import math
from typing import Literal

Reset = Literal["", "schedule", "stagnation"]
"""Reason to reset now. Empty (and therefore false): do not reset."""


class ResetPolicy:
    """Decides at every step whether to reset. It holds no weights.

    Args:
        every: steps between scheduled resets. 0: never.
        patience: evaluations in a row that do not beat the best held-out mean so far, after which
            to reset and start counting again. 0: never.

    Attributes:
        version: version of the policy that was last copied into the reference.

    Raises:
        ValueError: if either is negative.
    """

    def __init__(self, every: int, patience: int) -> None:
        if every < 0 or patience < 0:
            raise ValueError(f"every = {every} and patience = {patience} must not be negative")
        self._every = every
        self._patience = patience
        self._best: float | None = None
        self._stale = 0
        self.version = 0

    def observe(self, step: int, heldout_mean: float | None) -> Reset:
        """Reason to reset after a step, or "" to continue.

        If both reasons hold, the answer is "stagnation", which resets more. A scheduled reset does
        not change the count of evaluations.

        Args:
            step: the step that has just ended, starting at 1.
            heldout_mean: held-out mean. None or NaN if the step had no evaluation.
        """
        if heldout_mean is not None and not math.isnan(heldout_mean):
            better = self._best is None or heldout_mean > self._best
            self._best = heldout_mean if better else self._best
            self._stale = 0 if better else self._stale + 1
        if self._patience and self._stale >= self._patience:
            self._stale = 0
            return "stagnation"
        return "schedule" if self._every and step % self._every == 0 else ""

    def state(self) -> dict[str, float | int | None]:
        """State that a resumed run needs, JSON-serialisable."""
        return {"best": self._best, "stale": self._stale, "version": self.version}

    def load(self, state: dict[str, float | int | None]) -> None:
        """The inverse of `state`."""
        self._best, self._stale = state["best"], int(state["stale"] or 0)
        self.version = int(state["version"] or 0)
