"""Contract of what scores the steps of a completion: a process or an outcome reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .types import Task


class StepScorer(Protocol):
    """Scores every step of completions of one prompt.

    Attributes:
        tokens: tokens that its model has computed since it was made.
    """

    tokens: int

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score between 0 and 1 of each step of each completion, in order.

        Args:
            task: has the prompt of all completions.
            completions: their texts.
            ends: for each completion the exclusive character ends of its steps, which increase.

        Raises:
            UserError: if a completion cannot be scored, such as one that exceeds the context.
        """
        ...
