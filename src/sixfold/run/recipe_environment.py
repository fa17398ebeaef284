"""The environment of a recipe, and how its programs are isolated. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import plugins
from ..checks.environment import Environment
from ..checks.limits import Level, allow
from ..checks.prints import Prints
from ..environment import episodes, rewards
from ..environment.named import load_object
from ..environment.registry import any_needs, any_runs_programs
from ..environment.resource import Resource
from ..environment.solved import REWARD
from ..errors import UserError
from ..recipe.reward_models import PRM, reward_model_paths
from ..recipe.schema import EnvironmentConfig, EvalConfig, Recipe

_REWARD_MODEL = "sixfold.reward_model.reward:reward_model"
_PRM = "sixfold.reward_model.step_reward:process_reward"
"""Loaded by name: this module does not import torch."""

RESOURCES = "sixfold.resources"
"""Entry points of what rewards need, by the name in their rows. "sandbox" is a function of the
weakest level that says how this machine isolates programs, or raises UserError.
"""


def recipe_judge(
    recipe: Recipe, reward: Callable[..., Any] | None = None, ranks: int = 1
) -> Resource | None:
    """The judge of the recipe's rewards, or None if no reward needs one.

    Args:
        recipe: the whole run.
        reward: replaces the recipe's rewards.
        ranks: number of processes that share its budgets.

    Raises:
        UserError: if the judge cannot be used.
    """
    named = () if reward is not None else recipe.environment.rewards
    if not any_needs("judge", (*named, recipe.eval.strict)):
        return None
    made: Resource = plugins.load(RESOURCES, "judge")(recipe, ranks)
    return made


def recipe_environment(
    config: EnvironmentConfig,
    evaluation: EvalConfig,
    reward: Callable[..., Any] | None = None,
    judge: Resource | None = None,
    prints: Prints | None = None,
) -> Environment:
    """The environment with the recipe's rewards.

    Args:
        config: the rewards and their limits.
        evaluation: says what counts as solved.
        reward: replaces the recipe's rewards.
        judge: the recipe's judge (`recipe_judge`), which the caller closes.
        prints: gets what rewards print. None: it goes to the terminal. The caller closes it.

    Raises:
        UserError: if a reward runs programs and the machine isolates them too little, or if
            `eval.strict` names no reward.
    """
    # Refuse an unknown name before the model is loaded.
    strict_environment(config, evaluation, judge)
    allow(config.sandbox.isolation)
    if reward is None:
        isolation_note(config)  # refuses a machine that is too weak, also for an evaluation
    return Environment(
        (reward,) if reward is not None else [_loaded(n, config) for n in config.rewards],
        weights=() if reward is not None else config.weights,
        timeout_s=config.timeout_s,
        error_budget=config.error_budget,
        workers=config.workers,
        # An environment's own reward has no name, so the sum decides.
        metric=evaluation.metric or (REWARD if config.several_turns else ""),
        solved_at=evaluation.solved_at,
        judge=judge,
        prints=prints,
    )


def _loaded(name: str, config: EnvironmentConfig) -> str | Callable[..., Any]:
    """A reward model as a function, which runs in this process. The name of any other reward.

    Raises:
        UserError: if the reward model cannot be loaded.
    """
    paths = reward_model_paths(name)
    if name.startswith(PRM):
        return load_object(_PRM)(paths, config.prm, config.reward_model)  # type: ignore[no-any-return]
    return load_object(_REWARD_MODEL)(paths, config.reward_model) if paths else name


def strict_environment(
    config: EnvironmentConfig,
    evaluation: EvalConfig,
    judge: Resource | None = None,
    prints: Prints | None = None,
) -> Environment | None:
    """The environment with the verifier `eval.strict`. None if there is none.

    Args:
        config: limits of the checks.
        evaluation: names the verifier.
        judge: the recipe's judge, which the caller closes.
        prints: as in `recipe_environment`.

    Raises:
        UserError: if no reward has this name.
    """
    if not evaluation.strict:
        return None
    try:
        return Environment(
            (evaluation.strict,),
            timeout_s=config.timeout_s,
            error_budget=config.error_budget,
            workers=config.workers,
            solved_at=evaluation.solved_at,
            judge=judge,
            prints=prints,
        )
    except UserError as error:
        raise UserError(f"eval.strict: {error}") from error


def check_names(config: EnvironmentConfig, evaluation: EvalConfig) -> None:
    """Check the names of rewards and of the environment. Runs no user code.

    Raises:
        UserError: for an unknown name, a malformed one, or a file that does not exist.
    """
    for name in config.rewards:
        if paths := reward_model_paths(name):
            _check_reward_models(name, paths)
        else:
            rewards.NAMED.check(name)
    if evaluation.strict:
        try:
            rewards.NAMED.check(evaluation.strict)
        except UserError as error:
            raise UserError(f"eval.strict: {error}") from error
    if config.episode and not episodes.library_of(config.episode):
        episodes.NAMED.check(config.episode)


def _check_reward_models(name: str, paths: Sequence[str]) -> None:
    """Check the reward models of one reward, without loading them.

    Raises:
        UserError: if one has no name or is named twice.
    """
    if not all(paths):
        raise UserError(
            f"environment.rewards: '{name}' names no reward model. Write reward_model:PATH, or"
            " stage:NAME with an earlier stage"
        )
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UserError(
            f"environment.rewards: '{name}' names {twice[0]} twice. An ensemble has different"
            " models"
        )


def task_rewards(
    config: EnvironmentConfig, strict: str, reward: Callable[..., Any] | None = None
) -> tuple[str, ...]:
    """Names of all rewards that check the recipe's tasks.

    Args:
        config: names the rewards.
        strict: `eval.strict`.
        reward: replaces the recipe's rewards.
    """
    # An environment of several turns gives the reward itself, unless the recipe names others.
    own = bool(config.episode) and config.rewards == EnvironmentConfig().rewards
    named = () if reward is not None or own else config.rewards
    return (*named, strict) if strict else named


def isolation_note(config: EnvironmentConfig) -> str:
    """Line for the header of a run that says how its programs are isolated. "" if it runs none.

    Raises:
        UserError: if the machine gives less than `environment.sandbox.isolation`.
    """
    if not any_runs_programs(config.rewards):
        return ""
    return checked_isolation(config.sandbox.isolation)


def checked_isolation(level: Level) -> str:
    """How this machine isolates programs, in words.

    Raises:
        UserError: if it isolates them less than `level`.
    """
    banner: str = plugins.load(RESOURCES, "sandbox")(level)
    return banner
