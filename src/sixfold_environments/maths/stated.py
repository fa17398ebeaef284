"""The answer of a completion, by which votes are counted."""

from __future__ import annotations

import re

from .choices import choice
from .extraction import final_answer
from .numbers import exact_number
from .spelling import normalise

_GROUPED = r"\d{1,3}(?:,\d{3})+(?![\d,])"
_NUMBER = re.compile(rf"-?(?:{_GROUPED}|\d+)(?:\.\d+|/\d+)?")
_SPACED = re.compile(r"\s*([-+*/^=<>|,;:()\[\]{}])\s*")
_LONGEST = 28
"""Most characters of a number whose forms count as one answer. A longer one is compared as text."""


def answer_of(text: str) -> str:
    """The answer that a completion states, else its last number, else its last line.

    White space (around signs: or none), the case, a full stop at the end, different forms of one
    number (0.5, 1/2, \\frac{1}{2}) and of one option (C, (C), C. Paris) make no difference.
    """
    stated = final_answer(text).answer
    if stated is None:
        numbers = _NUMBER.findall(text)
        lines = text.split("\n")
        stated = numbers[-1] if numbers else next((s for s in reversed(lines) if s.strip()), "")
    plain = normalise(" ".join(stated.split()))
    if option := choice(plain):
        return option.letter.lower()
    number = exact_number(plain) if len(plain) <= _LONGEST else None
    return _SPACED.sub(r"\1", plain).lower() if number is None else str(number)
