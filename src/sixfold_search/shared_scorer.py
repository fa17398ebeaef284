"""A scorer that several searches share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sixfold.step_scorer import StepScorer
from sixfold.types import Task


class SharedScorer(StepScorer):
    """A scorer that several searches share, one call at a time.

    Args:
        scorer: the scorer.
        thread: the one thread in which it scores for all searches.

    Attributes:
        tokens: tokens of the calls of this search.
        thread: as given.
    """

    def __init__(self, scorer: StepScorer, thread: ThreadPoolExecutor) -> None:
        self.tokens = 0
        self.thread = thread
        self._scorer = scorer

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        before = self._scorer.tokens
        try:
            return self._scorer.score(task, completions, ends)
        finally:
            self.tokens += self._scorer.tokens - before
