"""Checks of numbers that a user gives, in a recipe, a hardware file or a prediction of a run.

They stand where such numbers become a workload, a device, a model or the phases of a step. Formulas
do not check their arguments again. Each raises `UserError` with one line that names the number.
"""

from __future__ import annotations

import math

from sixfold.errors import UserError


def positive(**values: float) -> None:
    """Refuse numbers that are zero, negative, infinite or not a number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} = {value:g}: must be a finite number above 0.")


def not_negative(**values: float) -> None:
    """Refuse numbers that are negative, infinite or not a number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} = {value:g}: must be a finite number, 0 or above.")


def whole(least: int = 1, /, **values: float) -> None:
    """Refuse counts that are not whole numbers of at least `least`."""
    for name, value in values.items():
        if not math.isfinite(value) or value < least or value != int(value):
            raise UserError(f"{name} = {value:g}: must be a whole number of at least {least}.")


def share(**values: float) -> None:
    """Refuse numbers outside 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name} = {value:g}: must be between 0 and 1.")
