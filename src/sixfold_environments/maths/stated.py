"""The answer of a completion, by which votes are counted."""

from __future__ import annotations

import re
from decimal import Decimal

from .extraction import final_answer

_GROUPED = r"\d{1,3}(?:,\d{3})+(?![\d,])"
_NUMBER = re.compile(rf"-?(?:{_GROUPED}|\d+)(?:\.\d+|/\d+)?")
_LONGEST = 28
"""Digits of decimal's context. Longer numbers would be rounded, so they stay text."""


def answer_of(text: str) -> str:
    """The answer that a completion states, else its last number, else its last line.

    White space, the case, a full stop at the end and different forms of one decimal number make no
    difference.
    """
    stated = final_answer(text).answer
    if stated is None:
        numbers = _NUMBER.findall(text)
        lines = text.split("\n")
        stated = numbers[-1] if numbers else next((s for s in reversed(lines) if s.strip()), "")
    plain = " ".join(stated.split()).rstrip(".").lower()
    number = plain.replace(",", "") if re.fullmatch(rf"-?{_GROUPED}(?:\.\d+)?", plain) else plain
    if len(number) > _LONGEST:
        return number
    try:
        return str(Decimal(number).normalize() + 0)  # -0 becomes 0
    except ArithmeticError:  # no number, or an exponent without bounds
        return plain
