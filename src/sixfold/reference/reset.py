"""When to copy the policy into the reference: every N steps, or once held-out accuracy stands still.

On stagnation ProRL (arXiv:2505.24864, section 2.3.1) starts the optimizer afresh too: by then the KL holds the policy to where it was, and the
moments to where it was going.
"""

from __future__ import annotations

import math
from typing import Literal

Reset = Literal["", "schedule", "stagnation"]
"""Why to reset now; empty (and so false): do not."""


class ResetPolicy:
    """Looks at every step and decides; it holds no weights. every: steps between resets on schedule. patience: evaluations in a row that do not
    beat the best held-out mean so far, after which to reset and count anew. 0 switches either off. Raises ValueError for negative ones.
    """

    def __init__(self, every: int, patience: int) -> None:
        if every < 0 or patience < 0:
            raise ValueError(f"every = {every} and patience = {patience} must not be negative")
        self._every = every
        self._patience = patience
        self._best: float | None = None
        self._stale = 0

    def look(self, step: int, heldout_mean: float | None) -> Reset:
        """Whether, and why, to reset after step `step` (from 1). heldout_mean: None in a step without an evaluation; NaN is as good as none.

        Where both reasons hold it is "stagnation", which resets more. A reset on schedule leaves the count of evaluations as it is.
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
        """What a resumed run must know, as JSON."""
        return {"best": self._best, "stale": self._stale}

    def load(self, state: dict[str, float | int | None]) -> None:
        """The inverse of `state`."""
        self._best, self._stale = state["best"], int(state["stale"] or 0)
