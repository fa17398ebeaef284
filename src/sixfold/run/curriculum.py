"""The curriculum of a run, from its settings and the pass rates of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..controller.curriculum import Curriculum, Limits
from ..data.files import Row, read_file
from ..errors import UserError
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
    known = {task.id for task in tasks.train}
    profile = read_pass_rates(Path(config.profile), known) if config.profile else {}
    per_step, seed = assembly.recipe.rollout.prompts_per_step, assembly.recipe.run.seed
    whole = assembly.recipe.data.whole_steps
    return Curriculum(tasks.train, per_step, seed, tasks.weights, limits, profile, whole)


def read_pass_rates(path: Path, known: set[str]) -> Mapping[str, tuple[float, float]]:
    """Stored pass rates: task id to (pass rate, samples). Rows of other tasks are left out.

    Args:
        path: file of rows with id, pass_rate (0 to 1) and samples.
        known: ids of the training tasks.

    Raises:
        UserError: if a row is malformed, or if the file has none of the tasks.
    """
    if not path.is_file():
        raise UserError(f"{_SETTING} = {path}: there is no such file")
    found = {}
    for row in read_file(path, 0, 0):
        name = str(row.fields.get("id", ""))
        if name in known:
            found[name] = _pass_rate(row)
    if not found:
        raise UserError(
            f"{_SETTING} = {path}: none of its ids is that of one of the {len(known)} training"
            f" tasks, such as {min(known)!r}. It must be measured on these tasks"
        )
    return found


def _pass_rate(row: Row) -> tuple[float, float]:
    return _number(row, "pass_rate", 1.0), _number(row, "samples", 1e9)


def _number(row: Row, name: str, most: float) -> float:
    value = row.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise UserError(f"{row.where}: {name} is {value!r}: expected a number from 0 to {most:g}")
    return float(value)
