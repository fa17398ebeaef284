"""Plans of the stages of a recipe, before anything is loaded. No torch."""

from __future__ import annotations

from ..checkpoint.model_source import with_model_folders
from ..recipe.plan import Plan, make_plan
from ..recipe.stages import StagedRecipe, in_stage
from ..run.recipe_environment import check_names


def stage_plans(staged: StagedRecipe, where: str) -> dict[str, Plan]:
    """The plan of each stage by its name, with the sizes of the model that it will get.

    Args:
        staged: the recipe.
        where: name of the recipe or folder of the run, for error messages.

    Raises:
        UserError: if the plan of a stage refuses its recipe.
    """
    found = {}
    for stage in staged.stages:
        with in_stage(stage.name):
            recipe = staged.planned(stage.name, where)
            found[stage.name] = make_plan(with_model_folders(recipe))
            check_names(recipe.environment, recipe.eval)
    return found
