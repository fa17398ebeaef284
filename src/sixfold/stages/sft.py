"""Kind `sft`: imitate worked solutions or conversations."""

from __future__ import annotations

from ..recipe.schema import Recipe
from ..run.start import Work
from ..run.worked import sft_trainer_config
from .examples import TaskExamples
from .supervised import SupervisedWork


def work(recipe: Recipe) -> Work:
    """What a stage of this kind does."""
    return SupervisedWork("SFT", sft_trainer_config(recipe.trainer, recipe.sft), TaskExamples)
