"""`cached`: marks rewards whose outcomes may be reused, with a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

F = TypeVar("F", bound=Callable[..., Any])

_VERSIONS: WeakKeyDictionary[Callable[..., Any], str] = WeakKeyDictionary()


def cached(version: str) -> Callable[[F], F]:
    """Decorator: outcomes of this reward are reused within a run.

    The reward must be a function of the completion and the task alone: no chance, no state, no
    other parameters. Its outcomes are kept by completion, task and version.

    Args:
        version: version of the verifier. Change it when a verdict may change.

    Raises:
        ValueError: for an empty version.
    """
    if not version:
        raise ValueError("cached: version must not be empty")

    def mark(function: F) -> F:
        _VERSIONS[function] = version
        return function

    return mark


def version_of(function: Callable[..., Any]) -> str:
    """Version of a reward with `cached`. "" for other rewards."""
    try:
        return _VERSIONS.get(function, "")
    except TypeError:  # a callable object that cannot be hashed or weakly referenced
        return ""
