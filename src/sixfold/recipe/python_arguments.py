"""Check the arguments of `sixfold.train` before anything is loaded or written. No torch.

Invariant: every mistake is a single UserError that names the Python argument, not a command-line
flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Protocol, runtime_checkable

from ..errors import RunFailed, UserError
from .checks import check_reward_models
from .dump import toml_literal
from .schema import Recipe

_COMMAND = re.compile(r"sixfold train --resume .*$")
"""The whole command. The path of the run comes last."""
_RESUME = re.compile(r"--resume\b(?: \S*/\S*?(?=[,;:]?(?:\s|$)))?")
_STAGE_ARGUMENTS = {"only": "only", "from": "first"}
_STAGE = re.compile(r"--(only|from) ([\w.-]*\w)")
_SETTING = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")


@runtime_checkable
class _Scalar(Protocol):
    """Number of an array library."""

    def item(self) -> Any: ...


@runtime_checkable
class _AlgorithmMethods(Protocol):
    """`algorithm.base.Algorithm` without its types, which need torch."""

    needs_reference: bool

    def prepare(self, batch: Any) -> Any: ...

    def compute_loss(self, batch: Any, logp: Any) -> Any: ...


@runtime_checkable
class _WithAdvantages(Protocol):
    """An algorithm that only has advantages to prepare."""

    needs_reference: bool

    def compute_advantages(self, batch: Any) -> Any: ...

    def compute_loss(self, batch: Any, logp: Any) -> Any: ...


@dataclass(frozen=True)
class _Adapted:
    """`algorithm.base.Algorithm` around an object with `compute_advantages`."""

    inner: _WithAdvantages

    @property
    def needs_reference(self) -> bool:
        return self.inner.needs_reference

    def prepare(self, batch: Any) -> Any:
        return self.inner.compute_advantages(batch)

    def compute_loss(self, batch: Any, logp: Any) -> Any:
        return self.inner.compute_loss(batch, logp)


@contextmanager
def python_words() -> Iterator[None]:
    """Make errors in this block name arguments of `sixfold.train`, not command-line flags."""
    try:
        yield
    except (UserError, RunFailed) as error:
        words = in_python(str(error))
        if words == str(error):
            raise
        raise type(error)(words) from error


def in_python(text: str) -> str:
    """Replace command-line flags in a message by arguments of `sixfold.train`."""
    text = _COMMAND.sub("sixfold.train(..., resume=True)", text)
    text = _RESUME.sub("resume=True", text).replace("--overwrite", "overwrite=True")
    text = _STAGE.sub(lambda m: f"{_STAGE_ARGUMENTS[m[1]]}='{m[2]}'", text)
    return _SETTING.sub(r"settings['\1']", text)


def checked_recipe(recipe: Any) -> str | Recipe:
    """Name or path of a recipe as text, or the Recipe itself.

    Raises:
        UserError: for any other type, or for settings without effect in a Recipe.
    """
    if isinstance(recipe, PathLike):
        recipe = fspath(recipe)
    if not isinstance(recipe, str | Recipe):
        raise UserError(
            f"recipe is of type {type(recipe).__name__}: give a .toml file, the name of a shipped"
            " recipe, or a Recipe; values go in settings"
        )
    if isinstance(recipe, Recipe):  # a file is checked when it is read
        check_reward_models([recipe.environment])
    return recipe


def checked_algorithm(algorithm: Any) -> Any:
    """The algorithm, or None. An object may have `compute_advantages` in place of `prepare`.

    Raises:
        UserError: if it does not.
    """
    if isinstance(algorithm, str):
        raise UserError(
            f"algorithm = {algorithm!r} is text: name it in settings, settings={{'algorithm.name':"
            f" {algorithm!r}}}"
        )
    if not isinstance(algorithm, type):
        if algorithm is None or isinstance(algorithm, _AlgorithmMethods):
            return algorithm
        if isinstance(algorithm, _WithAdvantages):
            return _Adapted(algorithm)
    shown = (
        f"the class {algorithm.__name__}"
        if isinstance(algorithm, type)
        else f"of type {type(algorithm).__name__}"
    )
    raise UserError(
        f"algorithm is {shown}: give an object with prepare (or compute_advantages), compute_loss"
        " and needs_reference, e.g. sixfold.algorithm.composed.make_algorithm(method)"
    )


_STAGE_SETTINGS = {
    "reward": "environment.rewards = ['path.py:function']",
    "environment": "environment.episode = 'path.py:Class'",
    "algorithm": "algorithm.name, or algorithm settings",
    "tasks": "data.source",
    "heldout": "data.heldout_split",
}
"""Argument of `sixfold.train` -> what a stage sets in its place."""


def check_no_objects(objects: Mapping[str, Any]) -> None:
    """Refuse objects given with a recipe that has stages: a resume could not find them again.

    Raises:
        UserError: with the setting of a stage that replaces the argument.
    """
    for name, value in objects.items():
        if value is not None:
            raise UserError(
                f"{name} is given, but the recipe has stages, which are resumed from its file: set"
                f" {_STAGE_SETTINGS[name]} in those that need it"
            )


def checked_tasks(argument: str, tasks: Any) -> Iterable[Any]:
    """The iterable of tasks. `given_tasks` checks each of them.

    Raises:
        UserError: if `tasks` is not an iterable of tasks.
    """
    if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Iterable):
        example = "[sixfold.Task(id='0', prompt='2+2=', answer=4)]"
        raise UserError(
            f"{argument} is of type {type(tasks).__name__}: give a list of tasks, e.g. {example};"
            " for a file, set data.source in settings"
        )
    return tasks


def episode_name(environment: Callable[..., Any]) -> str:
    """Value of `environment.episode` for a class or function."""
    name = getattr(environment, "__qualname__", type(environment).__qualname__)
    return f"{getattr(environment, '__module__', '')}:{name}"


def setting_flags(settings: Any) -> list[str]:
    """Convert dotted settings to command-line flags.

    Paths become text, and numbers of array libraries become plain numbers.

    Raises:
        UserError: for anything that a flag cannot express.
    """
    if settings is None:
        return []
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise UserError(
            "settings is not a dictionary by name: give e.g. settings={'trainer.learning_rate':"
            " 1e-6}"
        )
    flags = []
    for key, value in settings.items():
        literal = _literal(key, value)
        flags.append(f"--{key}={literal}")
    return flags


def _literal(key: str, value: Any) -> str:
    value = _plain(key, value)
    return value if isinstance(value, str) else toml_literal(value)


def _plain(key: str, value: Any) -> Any:
    """`value` as a TOML value: text, a number, true or false, or a list of these."""
    if isinstance(value, PathLike):
        return fspath(value)
    # Must come first: numpy.float64 is a float, but its repr differs.
    if isinstance(value, _Scalar):
        return _plain(key, value.item())
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if value is None:
        raise UserError(f"settings[{key!r}] is None: leave it out for the default")
    if isinstance(value, Mapping):
        inner = next(iter(value), "name")
        raise UserError(
            f"settings[{key!r}] is a dictionary: write one dotted key per setting, e.g."
            f" settings={{'{key}.{inner}': ...}}"
        )
    raise UserError(
        f"settings[{key!r}] is of type {type(value).__name__}: give text, a number, True or False,"
        " or a list of these"
    )
