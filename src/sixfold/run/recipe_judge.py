"""The judge of a recipe: its settings, the folder of its answers, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..environment.judge.family import family_of, same_family
from ..environment.judge.judge import Judge
from ..environment.judge.settings import (
    ConstitutionSettings,
    JudgeSettings,
    PairwiseSettings,
    ReferenceSettings,
    RubricSettings,
)
from ..environment.judge.spending import Cost
from ..environment.rewards import JUDGES
from ..ranks import Ranks
from ..recipe.schema import Recipe

FOLDER = "judge"
"""Folder of the judge's answers in the folder of a run."""


def recipe_judge(
    recipe: Recipe, reward: Callable[..., Any] | None = None, ranks: int = 1
) -> Judge | None:
    """The judge of the recipe's rewards, or None if no reward needs one.

    Args:
        recipe: the whole run.
        reward: replaces the recipe's rewards.
        ranks: number of processes that share its budgets.

    Raises:
        UserError: if the API key is missing or invalid.
    """
    named = () if reward is not None else recipe.environment.rewards
    if not JUDGES.intersection((*named, recipe.eval.strict)):
        return None
    return Judge(judge_settings(recipe), 1 / ranks)


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


def judge_notes(judge: Judge | None, policy: str) -> list[str]:
    """Lines for the start of a run: the judge, and a warning if it is of the policy's family.

    Args:
        judge: the judge, or None.
        policy: name or folder of the policy's model.
    """
    if judge is None:
        return []
    settings = judge.settings
    where = settings.url or "a local process"
    family = f", family {judge.family}" if judge.family else ""
    warning = same_family(judge.family, family_of(policy))
    lines = [f"judge: {settings.model} at {where}{family}"]
    return [*lines, f"WARNING: {warning}"] if warning else lines


def keep_answers(judge: Judge | None, run: Path, rank: int) -> None:
    """Read the judge's earlier answers in a run's folder, and write new ones there.

    Args:
        judge: the judge, or None.
        run: folder of the run.
        rank: this process.
    """
    if judge is not None:
        judge.keep_in(run / FOLDER, f"answers-{rank}.jsonl")


def judge_summary(judge: Judge | None, ranks: Ranks) -> dict[str, Any]:
    """Entry for summary.json: the judge, and its cost on all ranks.

    Args:
        judge: the judge, or None.
        ranks: the ranks of the run.
    """
    if judge is None:
        return {}
    settings = judge.settings
    spent = sum(ranks.gather(judge.spending.spent), Cost())
    about = {"model": settings.model, "url": settings.url, "family": judge.family}
    return {"judge": {**about, **asdict(spent)}}
