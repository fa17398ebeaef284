"""Isolation of the programs that a run's rewards start."""

from __future__ import annotations

from collections.abc import Callable

from ..environment.rewards import PROGRAMS
from ..environment.sandbox.isolation import detected, required
from ..recipe.schema import Recipe


def isolation_note(recipe: Recipe) -> str:
    """Line for the header of a run that says how its programs are isolated. "" if it runs none.

    Raises:
        UserError: if the machine gives less than `environment.sandbox.isolation`.
    """
    if not PROGRAMS.intersection(recipe.environment.rewards):
        return ""
    found = detected()
    required(recipe.environment.sandbox.isolation, found)
    return found.banner


def announce_isolation(recipe: Recipe, note: Callable[[str], None]) -> None:
    """Pass the line of `isolation_note` to `note`, if there is one.

    Raises:
        UserError: as `isolation_note`.
    """
    if text := isolation_note(recipe):
        note(text)
