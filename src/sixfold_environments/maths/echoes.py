"""Answers that repeat the question instead of working it out."""

from __future__ import annotations

import re

from .equations import stated_value
from .numbers import exact_number
from .spelling import normalise
from .times import time_of_day
from .units import quantity

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORKED_OUT = re.compile(r"[+-]?[\d.,]+|\\?[A-Za-z]+")
_MULTIPLICATION = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|×|·")
_OPERATION = re.compile(r"\d\s*\)?\s*(?:[+*^!-]|\\(?:cdot|times)(?![A-Za-z]))|\\binom|\)\s*\(")
_LITERAL = re.compile(r"\d+(?:\.\d+)?")
_NEUTRAL = {"0", "1"}


def echoes(answer: str, gold: str, prompt: str) -> bool:
    """True if the answer is an expression of the question that still has to be worked out.

    A decimal counts as worked out, with or without a unit. An equation is judged by the value that
    it states.

    Args:
        gold: normalised reference answer.
    """
    if not prompt or _WORKED_OUT.fullmatch(answer):
        return False
    spelled = normalise(prompt)
    found = stated_value(answer, spelled)
    if found and "=" not in gold:
        answer = found.value
        if _WORKED_OUT.fullmatch(answer):
            return False
    squashed = _squash(answer)
    if squashed == _squash(gold) or _TEXT.fullmatch(answer):
        return False
    if squashed not in _squash(spelled) and not _unevaluated(answer, gold, spelled):
        return False
    return not (_WORKED_OUT.fullmatch(quantity(answer).body) or time_of_day(answer))


def _unevaluated(answer: str, gold: str, prompt: str) -> bool:
    """True if a sum, product or power has only numbers of the question, in any order.

    This is judged only if the reference answer is a number.
    """
    if exact_number(gold) is None or exact_number(answer) is not None:
        return False
    if not _OPERATION.search(answer):
        return False
    numbers = set(_LITERAL.findall(answer)) - _NEUTRAL
    return bool(numbers) and numbers <= set(_LITERAL.findall(prompt))


def _squash(text: str) -> str:
    """Text without spaces, with one multiplication sign and one spelling of fractions.

    Only for finding echoes, never for equality.
    """
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", _MULTIPLICATION.sub("*", text))
    return re.sub(r"[\s{}$]", "", text)
