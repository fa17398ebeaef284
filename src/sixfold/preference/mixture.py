"""The loss that a stage trains: a weighted sum of rows of the zoo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loss import PreferenceLoss, Settings
from .losses import compared, margin
from .pairs import Pairs, Statistics, Unpaired


@dataclass(frozen=True)
class Term:
    """A loss of a mixture.

    Attributes:
        row: the loss.
        settings: its settings, with the recipe's overrides.
        weight: its weight in the sum.
    """

    row: PreferenceLoss
    settings: Settings
    weight: float = 1.0


class Mixture:
    """A weighted sum of losses, with the averages that some keep over the steps.

    Args:
        terms: all of pairs, or all of single completions.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)
        self._running: list[float | None] = [None] * len(terms)

    @property
    def needs_reference(self) -> bool:
        return any(term.row.needs_reference for term in self.terms)

    @property
    def needs_head(self) -> bool:
        return any(term.settings.needs_head for term in self.terms)

    @property
    def unpaired(self) -> bool:
        return self.terms[0].row.unpaired

    @property
    def scores_first(self) -> bool:
        """True if `whole_batch` reads the policy's log-probs: score the step before its update."""
        return any(term.row.statistics for term in self.terms)

    @property
    def needs_mismatched(self) -> bool:
        """True if a statistic reads `Unpaired.mismatched`."""
        return any(term.row.statistics == "reference point" for term in self.terms)

    @property
    def shown(self) -> Term:
        """The first term with a margin, whose numbers are logged. The first if none has one."""
        return next((term for term in self.terms if "beta" in term.row.reads), self.terms[0])

    def margin(self, pairs: Pairs) -> Tensor:
        """[N] beta * margin of each pair under the shown term."""
        row, settings = self.shown.row, self.shown.settings
        return settings.beta * margin(compared(row, pairs, settings), settings)

    def whole_batch(self, rows: Pairs | Unpaired, *, advance: bool = True) -> list[Statistics]:
        """Statistics of each term for a whole step.

        Args:
            rows: all rows of the step. Log-probs are read only if `scores_first`.
            advance: whether running averages move on, as they do once in each training step.
        """
        found = [
            term.row.whole_batch(rows, term.settings, running)
            for term, running in zip(self.terms, self._running, strict=True)
        ]
        if advance:
            self._running = [statistics.running for statistics in found]
        return found

    def per_pair(self, rows: Pairs | Unpaired, statistics: Sequence[Statistics]) -> Tensor:
        """[N] weighted sums of the losses of each row.

        Args:
            rows: all rows of a step, or some.
            statistics: those of the step for these rows (`Statistics.of`), one per term.
        """
        losses = [
            term.weight * term.row.per_pair(rows, term.settings, found)
            for term, found in zip(self.terms, statistics, strict=True)
        ]
        return sum(losses[1:], losses[0])

    def state(self) -> dict[str, Any]:
        """The running averages."""
        return {"running": self._running}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._running = list(state["running"])
