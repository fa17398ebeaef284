"""Kind `rl`: sample completions and learn from their rewards."""

from __future__ import annotations

from ..recipe.schema import Recipe
from ..run.rl import RlWork
from ..run.start import Work


def work(recipe: Recipe) -> Work:
    """What a stage of this kind does."""
    return RlWork(recipe)


def reads_tasks(recipe: Recipe) -> bool:
    """True: its [data] holds tasks."""
    return True
