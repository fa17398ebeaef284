"""The reference role, in words: how likely were these tokens before training?"""

from __future__ import annotations

from typing import Protocol

from ..batch import Batch


class Reference(Protocol):
    """Frozen; the same batch always gives the same answer."""

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_logp` filled in, or as it is where the loss needs none."""
        ...
