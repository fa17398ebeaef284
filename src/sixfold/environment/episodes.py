"""Environments of several turns: how `environment.episode` becomes a class of episodes."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..errors import UserError
from ..types import Task
from .episode import MakeEpisode
from .named import Named

EPISODES = Named(
    "environment",
    "class",
    {
        "calculator": "sixfold.environment.calculator:Calculator",
        "search_agent": "sixfold.environment.search.agent:SearchAgent",
        "sql_agent": "sixfold.environment.sql.agent:SqlAgent",
        "tools": "sixfold.environment.tools.episode:ToolEpisode",
        "web": "sixfold.environment.web.user_site:Web",
        "web_shop": "sixfold.environment.web.episode:WebShop",
    },
)

ADAPTERS = Named(
    "environment",
    "kind",
    {
        "gymnasium": "sixfold.interop.environments.gymnasium_env:gymnasium_episode",
        "openenv": "sixfold.interop.environments.openenv_env:openenv_episode",
        "trl": "sixfold.interop.environments.trl_env:trl_episode",
        "verifiers": "sixfold.interop.environments.verifiers_env:verifiers_episode",
    },
)
"""Kind of another library's environment -> function that makes its episodes from `KIND:NAME`."""

NOT_COPIED = ("web", "web_shop")
"""Built-in environments whose episodes cannot be copied: both copies would act on the same site."""

_FORM = "a class with `__init__(self, task)`, `async start(self)` and `async step(self, action)`"


def library_of(spec: str) -> str:
    """Library of the environment that `spec` names: a key of `ADAPTERS`. "" if it has none."""
    kind, colon, _ = spec.partition(":")
    return kind if colon and kind in ADAPTERS.built_in else ""


def load_episode(spec: str) -> MakeEpisode:
    """The class of episodes that `spec` names. This runs the module or file.

    Args:
        spec: a built-in name, `path/to/file.py:Class`, `module:Class`, or the name of another
            library's environment, `KIND:NAME`.

    Raises:
        UserError: if it does not exist, fails to load, or is not an environment.
    """
    if kind := library_of(spec):
        adapted: MakeEpisode = ADAPTERS.load(kind)(spec.partition(":")[2])
        return adapted
    made = EPISODES.load(spec)
    check_episode(made, f"environment.episode = {spec!r}")
    return made


def described() -> dict[str, str]:
    """One line for each built-in environment, and for each kind of another library's."""
    found = {}
    for name, spec in EPISODES.built_in.items():
        source, _, member = spec.rpartition(":")
        found[name] = _first_line(vars(import_module(source))[member])
    for kind, spec in ADAPTERS.built_in.items():
        found[f"{kind}:NAME"] = _first_line(import_module(spec.rpartition(":")[0]))
    return found


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


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
    if inspect.iscoroutinefunction(make):
        raise UserError(
            f"{where} is an async function. Write `def`, and do what takes long in `async start`"
        )
    if not isinstance(make, type):
        return
    members = {
        name: member for base in reversed(make.__mro__) for name, member in vars(base).items()
    }
    closes = ("close",) if "close" in members else ()
    for name in ("start", "step", *closes):
        if not inspect.iscoroutinefunction(members.get(name)):
            raise UserError(f"{where} has no method `async def {name}`. Give {_FORM}")
