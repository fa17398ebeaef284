"""Environments of several turns: how `environment.episode` becomes a class of episodes."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import UserError
from ..types import Task
from .episode import MakeEpisode
from .named import Named

EPISODES = Named(
    "environment", "class", {"calculator": "sixfold.environment.calculator:Calculator"}
)

_FORM = "a class with `__init__(self, task)`, `async start(self)` and `async step(self, action)`"


def load_episode(spec: str) -> MakeEpisode:
    """The class of episodes that `spec` names. This runs the module or file.

    Args:
        spec: a built-in name, `path/to/file.py:Class` or `module:Class`.

    Raises:
        UserError: if it does not exist, fails to load, or is not an environment.
    """
    made = EPISODES.load(spec)
    check_episode(made, f"environment.episode = {spec!r}")
    return made


def check_episode(make: Any, where: str) -> None:
    """Check a class of episodes, or a function that makes one, without calling it.

    Args:
        make: the class or function.
        where: how the user gave it, for messages.

    Raises:
        UserError: if it cannot be called with a task, or if it is a class without `start` and
            `step`.
    """
    if not callable(make):
        raise UserError(f"{where} is not callable. Give {_FORM}")
    try:
        inspect.signature(make).bind(Task(id="", prompt=""))
    except TypeError as error:
        raise UserError(f"{where} cannot be called with a task ({error}). Give {_FORM}") from error
    except ValueError:  # a class without a signature
        return
    if not isinstance(make, type):
        return
    members = {
        name: member for base in reversed(make.__mro__) for name, member in vars(base).items()
    }
    for name in ("start", "step"):
        if not inspect.iscoroutinefunction(members.get(name)):
            raise UserError(f"{where} has no method `async def {name}`. Give {_FORM}")
