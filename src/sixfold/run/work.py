"""Base class of what a run does once its folder is open."""

from __future__ import annotations

from collections.abc import Iterable

from ..algorithm.base import Algorithm
from ..checkpoint.best import BestSteps
from ..checkpoint.checkpoint import Checkpoint
from ..recipe.schema import Recipe
from .assemble import Assembly
from .context import RunContext


class Work:
    """What a run does once its folder is open.

    Attributes:
        algorithm: algorithm given from Python, or None.
        examples: hash of examples that the tasks do not decide, known once they are loaded.
        texts: texts of which a tokenizer is trained, or None.
    """

    algorithm: Algorithm | None = None
    examples: str = ""
    texts: Iterable[str] | None = None

    def check(self, recipe: Recipe, ranks: int) -> None:
        """Refuse a recipe that this number of ranks does not support.

        Raises:
            UserError: if it does not.
        """
        raise NotImplementedError

    def load(self, assembly: Assembly) -> None:
        """Load what may be refused. The run's folder is not made yet.

        Raises:
            UserError: if it does not fit.
        """
        raise NotImplementedError

    def go(
        self,
        context: RunContext,
        assembly: Assembly,
        best: BestSteps,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Do what the checkpoint lacks, and write the report.

        Args:
            context: the run.
            assembly: model, tasks and settings.
            best: steps whose checkpoints are kept.
            checkpoint: checkpoint to resume from, or None.

        Raises:
            Interrupted: if a signal stops the run.
        """
        raise NotImplementedError
