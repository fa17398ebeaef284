"""Contract of the examples that a supervised stage trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Group


class Examples(Protocol):
    """Training examples of a supervised stage.

    Attributes:
        heldout: examples that are never trained on, each a group with one trajectory.
        notes: messages for the user, one line each.
    """

    heldout: Sequence[Group]
    notes: list[str]

    def groups(self, step: int) -> list[Group]:
        """Examples of a step, counted from 1. They depend on the seed and the step alone."""
        ...
