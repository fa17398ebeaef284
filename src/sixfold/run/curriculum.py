"""The curriculum of a run, from its settings and the pass rates of its tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..controller.curriculum import Curriculum, Limits
from ..controller.dead_letters import DeadLetters
from ..data.profile import ProfileKey, read_profile
from ..errors import UserError
from ..types import Task
from .assemble import Assembly
from .profile_key import profile_key

_SETTING = "data.curriculum.profile"
_HASH = 12
_SHOWN = 60


def make_curriculum(
    assembly: Assembly, dead: DeadLetters, resumed: bool, warn: Callable[[str], None]
) -> Curriculum | None:
    """The curriculum of a run. None if its tasks are all drawn alike.

    Args:
        assembly: tasks and settings.
        dead: prompts that were set aside.
        resumed: the checkpoint has the pass rates, so the stored ones are not read again.
        warn: called if the stored pass rates are those of another model or verifier.

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
    profile: Mapping[str, tuple[float, float]] = {}
    if config.profile and not resumed:
        profile, key = read_pass_rates(Path(config.profile), tasks.train)
        if difference := _difference(key, assembly):
            warn(
                f"{_SETTING} = {config.profile} was measured with {difference} than this run has,"
                " so its pass rates may be wrong here. Measure again with a stage stratify on the"
                " model that is trained, or leave the setting empty"
            )
    per_step, seed = assembly.recipe.rollout.prompts_per_step, assembly.recipe.run.seed
    whole = assembly.recipe.data.whole_steps
    return Curriculum(tasks.train, per_step, seed, tasks.weights, limits, profile, whole, dead)


def read_pass_rates(
    path: Path, tasks: Sequence[Task]
) -> tuple[Mapping[str, tuple[float, float]], ProfileKey]:
    """Stored pass rates: task id to (pass rate, samples), and what they depend on.

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
    return found, profile.key


def _difference(stored: ProfileKey, assembly: Assembly) -> str:
    """What the run has otherwise than the profile, with both values. "": nothing."""
    own = profile_key(assembly)
    if assembly.policy.lora:  # a new adapter changes nothing, and its base has other names
        own = replace(own, weights=stored.weights)
    name = own.difference(stored)
    if not name:
        return ""
    values = []
    for key in (stored, own):
        part, _, setting = name.partition(".")
        value = getattr(key, part)
        shown = str(value.get(setting) if setting else value[:_HASH])
        values.append(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")
    return f"other {name} ({values[0]}, here {values[1]})"


def never_judged(curriculum: Curriculum, assembly: Assembly, rounds: int) -> str:
    """Warning that no task of a source will ever have enough samples to be judged. "": all may.

    A task that is drawn every n steps with K samples has at most K / (1 - 0.5^(n / half_life))
    samples by weight, a geometric series.

    Args:
        curriculum: the curriculum at the start.
        assembly: tasks and settings.
        rounds: maximum rounds per step of dynamic sampling. At most 1: none.
    """
    data, rollout = assembly.recipe.data, assembly.recipe.rollout
    config, weights = data.curriculum, assembly.tasks.weights
    sizes = Counter(task.source if weights else "" for task in curriculum.pool)
    total = sum(weights.get(source, 1.0) for source in sizes)
    for source, size in sizes.items():
        drawn = rollout.prompts_per_step * max(rounds, 1) * weights.get(source, 1.0) / total
        interval = max(1.0, size / drawn)
        most = rollout.samples_per_prompt / (1 - 0.5 ** (interval / config.half_life))
        if most < config.samples:
            of = f" of {source}" if source else ""
            return (
                f"no task{of} can be judged by the curriculum: each is drawn every {interval:.0f}"
                f" steps and has at most {most:.3g} samples by weight, fewer than"
                f" data.curriculum.samples = {config.samples:g}. Lower samples, or raise"
                " data.curriculum.half_life or rollout.samples_per_prompt"
            )
    return ""
