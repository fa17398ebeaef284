"""Isolation of the programs that a run's rewards start."""

from __future__ import annotations

from ..environment.rewards import TIME_THEMSELVES
from ..environment.sandbox.isolation import detected, required
from ..recipe.schema import Recipe


def isolation_note(recipe: Recipe) -> str:
    """Line for the header of a run that says how its programs are isolated. "" if it runs none.

    Raises:
        UserError: if the machine gives less than `environment.sandbox.isolation`.
    """
    if not TIME_THEMSELVES.intersection(recipe.environment.rewards):
        return ""
    found = detected()
    required(recipe.environment.sandbox.isolation, found)
    return found.banner
