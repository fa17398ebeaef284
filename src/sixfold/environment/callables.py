"""Reward functions given as Python objects.

They may be functions, lambdas, partials, bound methods or callable objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from ..errors import UserError
from .sampled import asked_of

FORMS = (
    "f(completion, task) -> float, f(group, task) -> list, or TRL's"
    " f(prompts, completions, **columns) -> list"
)
GROUP = "group"
"""Parameter of a reward over a whole group in Sixfold's form."""


def check_callable(reward: Any) -> None:
    """Raise UserError if `reward` cannot be called as a reward function."""
    if isinstance(reward, str):
        raise UserError(
            f"reward = {reward!r} is text. Name rewards in settings:"
            f" settings={{'environment.rewards': [{reward!r}]}}"
        )
    if isinstance(reward, list | tuple):
        raise UserError(
            f"reward is a {type(reward).__name__}. Give one function, or name several in settings"
            " under 'environment.rewards'"
        )
    if isinstance(reward, type) or not callable(reward):
        shown = f"the class {reward.__name__}" if isinstance(reward, type) else repr(reward)[:60]
        raise UserError(f"reward = {shown} is not a function. Use {FORMS}")
    if takes_columns(reward):
        return
    try:
        if takes_members(reward):
            inspect.signature(reward).bind(**{GROUP: ()}, task=None)
        else:
            inspect.signature(reward).bind("completion", None, **dict.fromkeys(asked_of(reward)))
    except TypeError as error:
        raise UserError(
            f"reward {callable_name(reward)} cannot be called with a completion and a task"
            f" ({error}). Use {FORMS}"
        ) from error
    except ValueError:  # a C function without a signature
        return


def takes_groups(reward: Callable[..., Any]) -> bool:
    """True if the reward scores whole groups, in either form."""
    return takes_columns(reward) or takes_members(reward)


def takes_members(reward: Callable[..., Any]) -> bool:
    """True if the reward is Sixfold's f(group, task): a parameter is named `group`."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a C function without a signature
        return False
    return GROUP in parameters and "completions" not in parameters


def takes_columns(reward: Callable[..., Any]) -> bool:
    """True if the reward has TRL's form: a parameter named `completions`, or only `**kwargs`."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a C function without a signature
        return False
    return "completions" in parameters or [p.kind for p in parameters.values()] == [
        inspect.Parameter.VAR_KEYWORD
    ]


def callable_name(reward: Callable[..., Any]) -> str:
    """Name under which a reward is logged."""
    while isinstance(reward, partial):
        reward = reward.func
    named = isinstance(reward, FunctionType | MethodType | BuiltinFunctionType)
    return reward.__name__ if named else type(reward).__name__


def runs_async(reward: Callable[..., Any]) -> bool:
    """True for an async function, also as a partial, a bound method or the call of an object."""
    if inspect.iscoroutinefunction(reward):
        return True
    return callable(reward) and inspect.iscoroutinefunction(type(reward).__call__)
