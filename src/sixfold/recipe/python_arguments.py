"""Arguments of `sixfold.train`, checked before anything is loaded or written. No torch.

Invariant: every mistake is one UserError that speaks of the Python argument, not of a command-line flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from typing import Any, Protocol, runtime_checkable

from ..errors import RunFailed, UserError
from .schema import Recipe
from .toml import toml_literal

_COMMAND = re.compile(r"sixfold train --resume .*$")
"""The whole command; the run's path comes last."""
_RESUME = re.compile(r"--resume\b(?: \S*/\S*?(?=[,;:]?(?:\s|$)))?")
_SETTING = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")


@runtime_checkable
class _Scalar(Protocol):
    """A number of an array library."""

    def item(self) -> Any: ...


@runtime_checkable
class _AlgorithmMethods(Protocol):
    """`algorithm.base.Algorithm` without its types, which would import torch."""

    needs_reference: bool

    def compute_advantages(self, batch: Any) -> Any: ...

    def compute_loss(self, batch: Any, logp: Any) -> Any: ...


@contextmanager
def python_words() -> Iterator[None]:
    """Name arguments of `sixfold.train` in errors that name flags of the command line."""
    try:
        yield
    except (UserError, RunFailed) as error:
        words = in_python(str(error))
        if words == str(error):
            raise
        raise type(error)(words) from error


def in_python(text: str) -> str:
    """A message with the arguments of `sixfold.train` in place of the command line's."""
    text = _COMMAND.sub("sixfold.train(..., resume=True)", text)
    text = _RESUME.sub("resume=True", text).replace("--overwrite", "overwrite=True")
    return _SETTING.sub(r"settings['\1']", text)


def checked_recipe(recipe: Any) -> str | Recipe:
    """A recipe's name or path as text, or the Recipe itself."""
    if isinstance(recipe, PathLike):
        recipe = fspath(recipe)
    if not isinstance(recipe, str | Recipe):
        raise UserError(
            f"recipe is of type {type(recipe).__name__}: give a .toml file, the name of a shipped recipe, or a Recipe; values go in settings"
        )
    return recipe


def checked_algorithm(algorithm: Any) -> None:
    """Raise UserError for an object without the methods of an algorithm."""
    if isinstance(algorithm, str):
        raise UserError(f"algorithm = {algorithm!r} is text: name it in settings, settings={{'algorithm.name': {algorithm!r}}}")
    if algorithm is not None and (isinstance(algorithm, type) or not isinstance(algorithm, _AlgorithmMethods)):
        shown = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else f"of type {type(algorithm).__name__}"
        raise UserError(
            f"algorithm is {shown}: give an object with compute_advantages, compute_loss and needs_reference, "
            "e.g. sixfold.algorithm.composed.make_algorithm(method)"
        )


def checked_tasks(argument: str, tasks: Any) -> list[Any]:
    """The items of an iterable of tasks; `given_tasks` looks at each of them."""
    if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Iterable):
        example = "[sixfold.Task(id='0', prompt='2+2=', answer=4)]"
        raise UserError(
            f"{argument} is of type {type(tasks).__name__}: give a list of tasks, e.g. {example}; for a file, set data.source in settings"
        )
    return list(tasks)


def setting_flags(settings: Any) -> list[str]:
    """Dotted settings as the flags of the command line. Paths and numbers of array libraries count as text and numbers."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise UserError("settings is not a dictionary by name: give e.g. settings={'trainer.learning_rate': 1e-6}")
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
    if isinstance(value, _Scalar):  # first: numpy.float64 is a float, but not written as one
        return _plain(key, value.item())
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if value is None:
        raise UserError(f"settings[{key!r}] is None: leave it out for the default")
    if isinstance(value, Mapping):
        inner = next(iter(value), "name")
        raise UserError(f"settings[{key!r}] is a dictionary: write one dotted key per setting, e.g. settings={{'{key}.{inner}': ...}}")
    raise UserError(f"settings[{key!r}] is of type {type(value).__name__}: give text, a number, True or False, or a list of these")
