"""The curriculum of a run, from its settings and the pass rates of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..controller.curriculum import Curriculum, Limits
from ..data.profile import read_profile
from ..errors import UserError
from ..types import Task
from .assemble import Assembly

_SETTING = "data.curriculum.profile"


def make_curriculum(assembly: Assembly) -> Curriculum | None:
    """The curriculum of a run. None if its tasks are all drawn alike.

    Raises:
        UserError: if no reward says what is solved, or if the stored pass rates cannot be read.
    """
    config, tasks = assembly.recipe.data.curriculum, assembly.tasks
    if not config.every:
        return None
    if not assembly.environment.solved_rule.decides:
        raise UserError(
            f"data.curriculum.every = {config.every} sorts tasks by how often they are solved, but"
            " the rewards are of steps alone and do not say it. Add a reward of whole replies, or"
            " set every = 0"
        )
    limits = Limits(
        config.every,
        config.easy,
        config.hard,
        config.retest,
        config.half_life,
        config.samples,
    )
    profile = read_pass_rates(Path(config.profile), tasks.train) if config.profile else {}
    per_step, seed = assembly.recipe.rollout.prompts_per_step, assembly.recipe.run.seed
    whole = assembly.recipe.data.whole_steps
    return Curriculum(tasks.train, per_step, seed, tasks.weights, limits, profile, whole)


def read_pass_rates(path: Path, tasks: Sequence[Task]) -> Mapping[str, tuple[float, float]]:
    """Stored pass rates: task id to (pass rate, samples).

    Args:
        path: profile, as `sixfold data` stores it.
        tasks: training tasks. Other tasks of the profile are left out.

    Raises:
        UserError: if it cannot be read, or if it has none of the tasks.
    """
    if not path.is_file():
        raise UserError(f"{_SETTING} = {path}: there is no such file")
    profile = read_profile(path)
    found = {
        task.id: (known.rate, float(known.samples))
        for task in tasks
        if (known := profile.find(task)) and known.rate is not None
    }
    if not found:
        raise UserError(
            f"{_SETTING} = {path}: it has none of the {len(tasks)} training tasks. It must be"
            " measured on the same prompts, with the texts that the recipe puts around them"
        )
    return found
