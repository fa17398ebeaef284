"""Several forward-only scorers as one.

The reference, the critic and the proximal pass each fill in their own field of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import Batch
from ..types import Group
from .base import Reference, Scorer


class Chain:
    """Runs the reference, then the other scorers."""

    def __init__(self, reference: Reference, others: Sequence[Scorer]) -> None:
        self._reference = reference
        self._others = others

    def start(self, groups: Sequence[Group]) -> None:
        """Start only the reference: the other scorers need the weights that this process trains."""
        self._reference.start(groups)

    def score(self, batch: Batch) -> Batch:
        """The batch with every scorer's field filled in."""
        for scorer in (self._reference, *self._others):
            batch = scorer.score(batch)
        return batch
