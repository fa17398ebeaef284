"""Base class of the kinds of stages. A new kind is such a class and a row in `recipe/stages.py`."""

from __future__ import annotations

from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.schema import Recipe
from ..run.work import Work


class StageKind:
    """What a stage of one kind does.

    Args:
        recipe: the whole recipe of the stage, with paths in place of stage names.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.method = resolve_algorithm(recipe.algorithm)

    def work(self) -> Work:
        """The work of the stage."""
        raise NotImplementedError
