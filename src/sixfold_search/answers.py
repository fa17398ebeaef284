"""The answer of a completion, by which votes are counted."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from sixfold_environments.maths.extraction import final_answer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


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
    try:
        return str(Decimal(plain.replace(",", "")).normalize())
    except InvalidOperation:
        return plain
