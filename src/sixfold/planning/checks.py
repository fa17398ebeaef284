"""Checks of numbers that a formula receives. Each raises `UserError` with one line."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..errors import UserError, nearest


def positive(**values: float) -> None:
    """Refuse numbers that are zero, negative, infinite or not a number.

    Raises:
        UserError: names the first such number.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} = {value:g}: must be a finite number above 0.")


def not_negative(**values: float) -> None:
    """Refuse numbers that are negative, infinite or not a number.

    Raises:
        UserError: names the first such number.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} = {value:g}: must be a finite number, 0 or above.")


def whole(least: int = 1, /, **values: float) -> None:
    """Refuse counts that are not whole numbers of at least `least`.

    Raises:
        UserError: names the first such count.
    """
    for name, value in values.items():
        if not math.isfinite(value) or value < least or value != int(value):
            raise UserError(f"{name} = {value:g}: must be a whole number of at least {least}.")


def share(**values: float) -> None:
    """Refuse numbers outside 0 to 1.

    Raises:
        UserError: names the first such number.
    """
    between(0, 1, **values)


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a word that is not among the choices.

    Args:
        name: name of the argument, for the message.
        value: the word.
        choices: valid words.

    Raises:
        UserError: lists the choices, and the closest one.
    """
    known = list(choices)
    if value not in known:
        hint = nearest(value, known)
        raise UserError(f"{name} = '{value}' is unknown: use {', '.join(known)}.{hint}")


def divides(**sizes: int) -> None:
    """Refuse a degree that does not divide a size.

    Args:
        **sizes: two numbers: first the size, then the degree.

    Raises:
        UserError: names both.
    """
    (name, size), (degree_name, degree) = sizes.items()
    if size % degree:
        raise UserError(f"{degree_name} = {degree} does not divide {name} = {size}.")


def between(low: float, high: float, /, **values: float) -> None:
    """Refuse numbers outside a range.

    Args:
        low: smallest valid number.
        high: largest valid number.
        **values: numbers to check.

    Raises:
        UserError: names the first such number.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise UserError(f"{name} = {value:g}: must be between {low:g} and {high:g}.")
