"""The judge of a recipe, as a resource of a run: its settings, answers in the run, and cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.recipe.schema import Recipe

from .counts import judge_metrics
from .family import family_of, same_family
from .judge import Judge
from .settings import (
    ConstitutionSettings,
    JudgeSettings,
    PairwiseSettings,
    ReferenceSettings,
    RubricSettings,
)
from .spending import Cost

if TYPE_CHECKING:
    from sixfold.ranks import Ranks

FOLDER = "judge"
"""Folder of the judge's answers in the folder of a run."""


class RecipeJudge(Judge):
    """The judge of a run (`sixfold.environment.resource.Resource`)."""

    def notes(self, model: str) -> list[str]:
        """The judge, and a warning if it is of the policy's family.

        Args:
            model: name or folder of the policy's model.
        """
        where = self.settings.url or "a local process"
        family = f", family {self.family}" if self.family else ""
        warning = same_family(self.family, family_of(model))
        lines = [f"judge: {self.settings.model} at {where}{family}"]
        return [*lines, f"WARNING: {warning}"] if warning else lines

    def keep(self, run: Path, rank: int) -> None:
        """Read the earlier answers in a run's folder, and write new ones there."""
        self.keep_in(run / FOLDER, f"answers-{rank}.jsonl")

    def reuse(self, run: Path) -> None:
        """Read the answers of a run. Nothing is written there."""
        self.read(run / FOLDER)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The metrics `judge/*` since the last call."""
        return judge_metrics(ranks.gather(self.take()))

    def summary(self, ranks: Ranks) -> dict[str, Any]:
        spent = sum(ranks.gather(self.spending.spent), Cost())
        about = {"model": self.settings.model, "url": self.settings.url, "family": self.family}
        return {"judge": {**about, **asdict(spent)}}


def recipe_judge(recipe: Recipe, ranks: int) -> RecipeJudge:
    """The judge of a recipe.

    Args:
        ranks: number of processes that share its budgets.

    Raises:
        UserError: if the API key is missing or invalid.
    """
    return RecipeJudge(judge_settings(recipe), 1 / ranks)


def judge_settings(recipe: Recipe) -> JudgeSettings:
    """Settings of the judge: `environment.judge`, `eval.solved_at` and `run.seed`."""
    given = recipe.environment.judge.model_dump()
    return JudgeSettings(
        **{
            **given,
            "rubric": RubricSettings(**given["rubric"]),
            "reference": ReferenceSettings(**given["reference"]),
            "pairwise": PairwiseSettings(**given["pairwise"]),
            "constitution": ConstitutionSettings(**given["constitution"]),
            "solved_at": recipe.eval.solved_at,
            "seed": recipe.run.seed,
        }
    )
