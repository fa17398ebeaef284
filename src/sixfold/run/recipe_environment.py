"""The environment of a recipe. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..environment.judge.judge import Judge
from ..environment.sandbox.levels import allow
from ..environment.scorer import Environment
from ..environment.solved import REWARD
from ..errors import UserError
from ..recipe.schema import EnvironmentConfig, Recipe
from .isolation import isolation_note


def recipe_environment(
    recipe: Recipe, reward: Callable[..., Any] | None = None, judge: Judge | None = None
) -> Environment:
    """The environment with the recipe's rewards.

    Args:
        recipe: the whole run.
        reward: replaces the recipe's rewards.
        judge: the recipe's judge (`recipe_judge`), which the caller closes.

    Raises:
        UserError: if a reward runs programs and the machine isolates them too little, or if
            `eval.strict` names no reward.
    """
    strict_environment(recipe, judge)  # refuse an unknown name before the model is loaded
    config = recipe.environment
    allow(config.sandbox.isolation)
    if reward is None:
        isolation_note(recipe)  # refuses a machine that is too weak, also for an evaluation
    return Environment(
        (reward,) if reward is not None else config.rewards,
        weights=() if reward is not None else config.weights,
        timeout_s=config.timeout_s,
        error_budget=config.error_budget,
        workers=config.workers,
        # An environment's own reward has no name, so the sum decides.
        metric=recipe.eval.metric or (REWARD if config.several_turns else ""),
        solved_at=recipe.eval.solved_at,
        judge=judge,
    )


def strict_environment(recipe: Recipe, judge: Judge | None = None) -> Environment | None:
    """The environment with the verifier `eval.strict`. None if there is none.

    Args:
        recipe: the whole run.
        judge: the recipe's judge, which the caller closes.

    Raises:
        UserError: if no reward has this name.
    """
    if not recipe.eval.strict:
        return None
    config = recipe.environment
    try:
        return Environment(
            (recipe.eval.strict,),
            timeout_s=config.timeout_s,
            error_budget=config.error_budget,
            workers=config.workers,
            solved_at=recipe.eval.solved_at,
            judge=judge,
        )
    except UserError as error:
        raise UserError(f"eval.strict: {error}") from error


def task_rewards(recipe: Recipe, reward: Callable[..., Any] | None = None) -> tuple[str, ...]:
    """Names of all rewards that check the recipe's tasks.

    Args:
        recipe: the whole run.
        reward: replaces the recipe's rewards.
    """
    config = recipe.environment
    # An environment of several turns gives the reward itself, unless the recipe names others.
    own = bool(config.episode) and config.rewards == EnvironmentConfig().rewards
    named = () if reward is not None or own else config.rewards
    return (*named, recipe.eval.strict) if recipe.eval.strict else named
