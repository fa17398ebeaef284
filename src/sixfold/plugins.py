"""What installed packages add to Sixfold: entry points of their distributions, by group.

The core knows its other packages, and those of users, by these names alone. Names are read without
importing anything. What a name stands for is imported when it is used.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from .errors import UserError, one_line


class HasSpec(Protocol):
    """A row of a registry.

    Attributes:
        spec: the object, as `module:object`.
    """

    @property
    def spec(self) -> str: ...


Row = TypeVar("Row", bound=HasSpec)

VERBS = "sixfold.verbs"
"""Commands: a module with `PURPOSE` (one line) and `run(arguments)`, which gives the exit code."""

CONVERTERS = "sixfold.converters"
"""Settings of another framework: a `commands.algorithms.Converter`."""

ROLLOUTS = "sixfold.rollouts"
"""How a stage of kind `sample` gets completions: a subclass of `rollout.base.Rollout`, made from
the run's `Assembly` alone. Its static method `check` refuses settings that cannot work; its
attribute `scorer_weights` is a hash of the model that scores, or "".
"""

PREDICTOR = "sixfold.predictor"
"""Expected seconds of a run: a module that is a `report.prediction.Predictor`."""


@cache
def _every() -> Mapping[str, Mapping[str, list[EntryPoint]]]:
    found: dict[str, dict[str, list[EntryPoint]]] = {}
    for group in entry_points().groups:
        if group.startswith("sixfold."):
            named = found.setdefault(group, {})
            for point in sorted(entry_points(group=group), key=lambda point: point.name):
                others = named.setdefault(point.name, [])
                if all(other.value != point.value for other in others):
                    others.append(point)
    return found


def names(group: str) -> list[str]:
    """Names of a group, sorted."""
    return list(_every().get(group, ()))


def _point(group: str, name: str) -> EntryPoint:
    points = _every().get(group, {}).get(name, [])
    if not points:
        raise UserError(f"no installed package has {name!r} among its {_kind(group)}")
    if len(points) > 1:
        packages = " and ".join(_package(point) for point in points)
        raise UserError(
            f"{_kind(group)} {name!r} is registered by {packages}. Uninstall one, or rename its"
            " entry point"
        )
    return points[0]


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _kind(group: str) -> str:
    return group.removeprefix("sixfold.")


def value(group: str, name: str) -> str:
    """What a name stands for, as `module:object` or `module`. Nothing is imported.

    Raises:
        UserError: if no package registers it, or several do.
    """
    return _point(group, name).value


def load(group: str, name: str) -> Any:
    """What a name stands for. Its module is imported.

    Raises:
        UserError: if no package registers it, or several do, or if it cannot be imported.
    """
    point = _point(group, name)
    try:
        return point.load()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also sys.exit, which would end the command without a word
        raise UserError(
            f"{_kind(group)} {name!r} of the package {_package(point)}: cannot load {point.value}:"
            f" {one_line(error)}"
        ) from error


def text_of(group: str, name: str, constant: str) -> str:
    """A constant of the module that a name stands for. The module is read, not imported.

    Returns:
        "" if it has no such text.
    """
    found = module_spec(value(group, name))
    source = Path(found.origin or "") if found else Path()
    if source.suffix != ".py":
        return ""
    with suppress(SyntaxError, ValueError, OSError):  # importing it will say what is wrong
        for node in ast.parse(source.read_bytes()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
                return str(ast.literal_eval(node.value))
    return ""


def module_spec(name: str) -> ModuleSpec | None:
    """Where a module is, without running any code. None if it is not found.

    `importlib.util.find_spec` would run the packages that hold the module.
    """
    inside: Sequence[str] | None = None
    found = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        whole = ".".join(parts[:end])
        specs = (finder.find_spec(whole, inside) for finder in sys.meta_path)
        found = next((spec for spec in specs if spec is not None), None)
        inside = found.submodule_search_locations if found else None
        if found is None or (inside is None and end < len(parts)):
            return None
    return found


class Registered(Mapping[str, str], Generic[Row]):
    """The names of a group as a mapping: name -> `module:object`.

    A name stands for a row, which has the `spec` of the object and what the core must know about
    it, or for the object itself.

    Args:
        group: the group.
        row: class of its rows.
        plain: makes the row of an object that was registered without one, from its spec.
    """

    def __init__(self, group: str, row: type[Row], plain: Callable[[str], Row]) -> None:
        self._group = group
        self._row = row
        self._plain = plain

    def row(self, name: str) -> Row:
        """The row of a name. Imports the module of the row.

        Raises:
            UserError: as `load`.
        """
        found = load(self._group, name)
        return found if isinstance(found, self._row) else self._plain(value(self._group, name))

    def __getitem__(self, name: str) -> str:
        if name not in self:
            raise KeyError(name)
        return self.row(name).spec

    def __contains__(self, name: object) -> bool:
        return name in _every().get(self._group, ())

    def __iter__(self) -> Iterator[str]:
        return iter(names(self._group))

    def __len__(self) -> int:
        return len(names(self._group))
