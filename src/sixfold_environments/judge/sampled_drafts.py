"""Sample completions of a model as drafts for `sixfold critique`."""

from __future__ import annotations

from sixfold.checkpoint.model_source import model_folder
from sixfold.controller.stream import step_seed
from sixfold.data.task_set import drawn_tasks
from sixfold.recipe.schema import Recipe
from sixfold.run.assemble import assemble
from sixfold.types import Task

from .critique import Draft


def sampled_drafts(recipe: Recipe, model: str, count: int) -> list[Draft]:
    """Sample one completion per task.

    Args:
        model: checkpoint, run or model. "": the recipe's model.
        count: number of training tasks.

    Raises:
        UserError: if the model cannot be loaded.
    """
    source = model_folder(model, "--model") if model else ""
    world = assemble(recipe, source, reward=_unscored)
    try:
        tasks = drawn_tasks(world.tasks.train, count, recipe.run.seed)
        groups = world.sample(world.rollout(1), tasks, step_seed(recipe.run.seed, 0))
    finally:
        world.close()
    return [Draft(g.task, t.graded_text) for g in groups for t in g.trajectories]


def _unscored(completion: str, task: Task) -> float:
    """Replaces the recipe's rewards, because drafts are not scored."""
    return 0.0
