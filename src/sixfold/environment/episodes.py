"""Environments of several turns: how `environment.episode` becomes a class of episodes."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..errors import UserError
from ..types import Task
from .blocking_episode import is_blocking
from .episode import MakeEpisode
from .named import Named
from .registry import EPISODES, LIBRARIES

AGENT = "agent"
"""Environment of trajectories that a recipe's agent has played."""

NAMED = Named("environment", "class", EPISODES)
LIBRARY = Named("environment", "kind", LIBRARIES)


_FORM = (
    "a class with `__init__(self, task)`, `async start(self)` and `async step(self, action)` (or"
    " both without async, if they block)"
)


def library_of(spec: str) -> str:
    """Library of the environment that `spec` names (`registry.LIBRARIES`). "" if it has none."""
    kind, colon, _ = spec.partition(":")
    return kind if colon and kind in LIBRARIES else ""


def load_episode(spec: str) -> MakeEpisode:
    """The class of episodes that `spec` names. This runs the module or file.

    Args:
        spec: a built-in name, `path/to/file.py:Class`, `module:Class`, or the name of another
            library's environment, `KIND:NAME`.

    Raises:
        UserError: if it does not exist, fails to load, or is not an environment.
    """
    if kind := library_of(spec):
        adapted: MakeEpisode = LIBRARY.load(kind)(spec.partition(":")[2])
        return adapted
    made = NAMED.load(spec)
    check_episode(made, f"environment.episode = {spec!r}")
    return made


def described() -> dict[str, str]:
    """One line for each built-in environment, and for each kind of another library's."""
    found = {}
    for name, spec in EPISODES.items():
        source, _, member = spec.rpartition(":")
        found[name] = _first_line(vars(import_module(source))[member])
    for kind, spec in LIBRARIES.items():
        found[f"{kind}:NAME"] = _first_line(import_module(spec.rpartition(":")[0]))
    return found


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def check_episode(make: Any, where: str) -> None:
    """Check a class of episodes, or a function that makes one, without calling it.

    Args:
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
    if inspect.iscoroutinefunction(make):
        raise UserError(
            f"{where} is an async function. Write `def`, and do what takes long in `async start`"
        )
    if not isinstance(make, type):
        return
    members = {
        name: member for base in reversed(make.__mro__) for name, member in vars(base).items()
    }
    if is_blocking(make):
        if inspect.iscoroutinefunction(members.get("close")):
            raise UserError(f"{where}: only `close` is async. Make all methods async, or none")
        return
    closes = ("close",) if "close" in members else ()
    for name in ("start", "step", *closes):
        if not inspect.iscoroutinefunction(members.get(name)):
            raise UserError(f"{where} has no method `async def {name}`. Give {_FORM}")
