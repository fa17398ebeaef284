"""Base class of the kinds of stages. A new kind is such a class and a row in `recipe/stages.py`."""

from __future__ import annotations

from ..recipe.schema import Recipe
from ..run.work import Work


class StageKind:
    """What stages of one kind do."""

    def work(self, recipe: Recipe) -> Work:
        """The work of a stage.

        Args:
            recipe: the whole recipe of the stage, with paths in place of stage names.
        """
        raise NotImplementedError

    def reads_tasks(self, recipe: Recipe) -> bool:
        """True if [data] holds tasks, which `assemble` loads. False: the work reads it."""
        return True
