"""Python API: the same run as `sixfold train`, with the caller's reward function and tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint.model_source import with_model_folders
from .environment.callables import check_callable
from .environment.episode import MakeEpisode
from .environment.episodes import check_episode
from .errors import UserError, check_platform
from .recipe.python_arguments import (
    check_no_objects,
    checked_algorithm,
    checked_recipe,
    checked_tasks,
    episode_name,
    in_python,
    python_words,
    setting_flags,
)
from .recipe.schema import Recipe
from .recipe.stages import StagedRecipe
from .recipe.toml import load_named, parse_staged
from .types import Task

if TYPE_CHECKING:  # at run time it would bring torch in
    from .algorithm.base import Algorithm


def train(
    recipe: str | PathLike[str] | Recipe = "",
    *,
    reward: Callable[..., Any] | None = None,
    environment: MakeEpisode | None = None,
    algorithm: Algorithm | None = None,
    tasks: Iterable[Task] | None = None,
    heldout: Iterable[Task] | None = (),
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    only: str = "",
    first: str = "",
) -> Path:
    """Train, and return the folder of the run. A recipe with stages runs all of them.

    Args:
        recipe: a TOML file, the name of a shipped recipe, a Recipe, or empty for the defaults. A
            recipe with stages takes no objects: `reward`, `environment`, `algorithm` and `tasks`
            are settings of its stages.
        reward: `f(completion, task) -> float`, or a function written for TRL,
            `f(prompts, completions, **columns) -> list`. It replaces the recipe's rewards and runs
            in this process.
        environment: a class of episodes, or a function from a task to an episode
            (`environment.episode`). It replaces `environment.episode` of the recipe and runs in
            this process.
        algorithm: an object with the methods of `algorithm.base.Algorithm`. It replaces the
            recipe's algorithm. `compute_advantages` may stand in place of `prepare`.
        tasks: training tasks. They replace the recipe's dataset.
        heldout: held-out tasks for evaluation, with `tasks`.
        settings: dotted settings that replace those of the recipe, e.g. {"trainer.learning_rate":
            1e-6}.
        resume: continue the run of this name.
        overwrite: replace the run of this name.
        only: name of a stage that is run alone, with what the others have made.
        first: name of a stage that is made again, with all after it.

    Raises:
        UserError: for bad input.
        KeyboardInterrupt: if a signal stopped the run. Its last checkpoint stays.
    """
    from .recipe.plan import make_plan
    from .run.start import train_run
    from .stages.plans import stage_plans

    with python_words():
        check_platform(os.name)
        flags = setting_flags(settings)
        recipe = checked_recipe(recipe)
        if isinstance(recipe, Recipe):
            if flags:
                raise UserError(
                    "settings go with a recipe file or name; with a Recipe object, give it the"
                    " values"
                )
            staged = StagedRecipe(recipe)
        else:
            staged = (
                load_named(recipe, flags)
                if recipe
                else parse_staged('run.name = "run"', "sixfold.train", flags)
            )
        resolved = staged.base
        if reward is not None:
            check_callable(reward)
        if environment is not None:
            check_episode(environment, "environment")
            resolved = resolved.with_settings({"environment.episode": episode_name(environment)})
        algorithm = checked_algorithm(algorithm)
        if tasks is None and heldout:
            raise UserError(
                "heldout is given without tasks: give both, or set data.heldout or"
                " data.heldout_split for the recipe's dataset"
            )
        if resume and overwrite:
            raise UserError(
                "resume=True goes on with the run, overwrite=True replaces it: give one of them"
            )
        folder = Path(resolved.run.dir) / resolved.run.name
        if (only or first) and not staged.stages:
            raise UserError("only and first name a stage, but the recipe has no [[stages]]")
        if only and first:
            raise UserError(
                "give only, to run one stage, or first, to run it and all later ones: not both"
            )
        if staged.stages:
            objects = {"reward": reward, "environment": environment, "algorithm": algorithm}
            check_no_objects({**objects, "tasks": tasks, "heldout": heldout or None})
            stage_plans(staged, str(folder))
            from .stages.driver import train_stages

            earlier = folder if resume else None
            code = train_stages(staged, resume=earlier, overwrite=overwrite, only=only, first=first)
            return _ended(code, folder)
        given = None if tasks is None else checked_tasks("tasks", tasks)
        held = () if heldout is None else checked_tasks("heldout", heldout)
        resolved = with_model_folders(resolved)
        make_plan(resolved, own_reward=reward is not None)
        own: dict[str, Any] = {
            "reward": reward,
            "environment": environment,
            "algorithm": algorithm,
            "tasks": given,
            "heldout": held,
        }
        code = train_run(
            resolved, resume=folder if resume else None, overwrite=overwrite, words=in_python, **own
        )
    return _ended(code, folder)


def _ended(code: int, folder: Path) -> Path:
    if code:
        raise KeyboardInterrupt(f"stopped by signal {code - 128}")
    return folder
