"""Pass rates of a model on the tasks of an environment, for `sixfold audit --model`."""

from __future__ import annotations

from sixfold.checkpoint.model_source import model_folder
from sixfold.controller.stream import step_seed
from sixfold.data.task_set import drawn_tasks
from sixfold.environment.preflight import preflight
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe
from sixfold.run.assemble import assemble

from .finding import Finding, Level

ROLLOUTS = 50
"""Completions that are sampled, as in the pre-flight of a run."""


def check_pass_rates(recipe: Recipe, model: str) -> Finding:
    """Share of the sampled completions that solve their task, and how it varies.

    Args:
        model: checkpoint, run or model.

    Raises:
        UserError: if the model cannot be loaded, or if every check fails.
    """
    world = assemble(recipe, model_folder(model, "--model"))
    try:
        rollout = world.rollout()
        count = -(-ROLLOUTS // rollout.samples)
        tasks = drawn_tasks(world.tasks.train, count, recipe.run.seed)
        groups = world.sample(rollout, tasks, step_seed(recipe.run.seed, 0), scored=True)
    finally:
        world.close()
    rates = []
    solved: list[bool] = []
    for group in groups:
        found = [
            bool(t.reward.solved)
            for t in group.trajectories
            if t.reward and t.reward.value is not None
        ]
        solved += found
        rates += [sum(found) / len(found)] if found else []
    if not solved:
        raise UserError("sixfold audit: every check of the model's completions failed")
    verdict = preflight(solved)
    level: Level = "warning" if verdict.label in ("too hard", "too easy") else "ok"
    never, always = rates.count(0.0), rates.count(1.0)
    return Finding(
        "pass rate",
        level,
        f"{verdict.pass_rate:.0%} of {len(solved)} completions solved, {verdict.label}",
        (
            f"of {len(rates)} tasks: {never} never solved, {len(rates) - never - always} sometimes,"
            f" {always} always; only the middle ones give a gradient",
        ),
        verdict.advice if level == "warning" else "",
    )
