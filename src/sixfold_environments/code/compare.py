"""Comparison of outputs with expected values, on the trusted side.

Outputs of functions are the JSON of `wire`. They are never decoded here: the objects of a hostile
program could be slow to hash. So the comparison walks the JSON.

**Values, strictly** (function tests; expected values come from JSON):

- A bool is only equal to a bool, text to text, null to null.
- An expected integer needs an integer. An expected float also takes an integer: JSON writers drop
  ".0". Floats must be equal exactly, unless the task declares a tolerance.
- A tuple counts as a list: JSON has one kind of sequence. A set does not.
- An integer key of a dictionary counts as its text: JSON has only text keys.
- NaN and infinity equal nothing.

**Values, as Python's ==** (assert tests): types are compared as Python does: 1 == 1.0 == True, and
a tuple is not a list.

**Text** (standard output): line by line, then word by word. Space at the ends of lines and empty
lines at the end do not count. A word must be the same text. A word with a decimal point or an
exponent may also be another spelling of the same number, compared exactly. With a tolerance, every
number may differ by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_LONGEST_NUMBER = 400
_SEQUENCES = {list: "", tuple: "t", set: "s", frozenset: "z"}


class Rules:
    """How values are compared.

    Args:
        tolerance: largest difference of two numbers, times the size of the expected number or 1,
            whichever is larger. None: numbers must be equal.
        as_python: types are compared as Python's == does.
    """

    def __init__(self, tolerance: float | None = None, as_python: bool = False) -> None:
        self._tolerance = tolerance
        self._as_python = as_python

    def same(self, expected: Any, found: Any) -> bool:
        """True if the JSON `found` represents a value that equals `expected`."""
        number = _number(found)
        if isinstance(expected, bool) or isinstance(found, bool):
            return self._same_bool(expected, found if number is None else number)
        if isinstance(expected, int | float):
            return number is not None and self._close(expected, number)
        if isinstance(expected, Mapping):
            return self._same_pairs(expected, found)
        if isinstance(expected, list | tuple):
            return self._same_sequence(expected, found)
        if isinstance(expected, set | frozenset):
            return self._same_set(expected, found)
        if isinstance(expected, bytes):
            return isinstance(found, dict) and found.get("b") == expected.hex()
        if isinstance(expected, complex):
            return _complex(found) == expected
        return type(expected) is type(found) and bool(expected == found)

    def _same_bool(self, expected: Any, found: Any) -> bool:
        if self._as_python and isinstance(expected, int | float):
            return isinstance(found, int | float) and expected == found
        return isinstance(expected, bool) and found is expected

    def _close(self, expected: int | float, found: int | float) -> bool:
        if isinstance(found, float) and not math.isfinite(found):
            return self._as_python and expected == found
        if self._tolerance is not None:
            return _within(expected, found, self._tolerance)
        if not self._as_python and isinstance(expected, int) and isinstance(found, float):
            return False
        return expected == found

    def _same_sequence(self, expected: Sequence[Any], found: Any) -> bool:
        tag = "t" if isinstance(found, dict) else ""
        if self._as_python and tag != _SEQUENCES[type(expected)]:
            return False
        items = found.get("t") if isinstance(found, dict) else found
        return (
            isinstance(items, list)
            and len(items) == len(expected)
            and all(self.same(e, f) for e, f in zip(expected, items, strict=True))
        )

    def _same_set(self, expected: set[Any] | frozenset[Any], found: Any) -> bool:
        items = found.get("s", found.get("z")) if isinstance(found, dict) else None
        return isinstance(items, list) and self._covers(
            [(e, None) for e in expected], [(f, None) for f in items]
        )

    def _same_pairs(self, expected: Mapping[Any, Any], found: Any) -> bool:
        pairs = found.get("d") if isinstance(found, dict) else None
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            return False
        return self._covers(list(expected.items()), [(key, value) for key, value in pairs])

    def _covers(self, expected: list[tuple[Any, Any]], found: list[tuple[Any, Any]]) -> bool:
        """True if every expected pair has one found pair: same key and same value."""
        if len(expected) != len(found):
            return False
        left: dict[str, list[tuple[Any, Any]]] = {}
        for key, value in expected:
            left.setdefault(self._label(key), []).append((key, value))
        return all(self._take(left, key, value) for key, value in found)

    def _take(self, left: dict[str, list[tuple[Any, Any]]], key: Any, value: Any) -> bool:
        """Remove the expected pair that equals a found pair. False if there is none."""
        labels = [self._label(_shape(key))]
        if not self._as_python and type(key) is int:
            labels.append(f"s{key}")
        for label in labels:
            like = left.get(label, [])
            for index, (other, wanted) in enumerate(like):
                if self._same_key(other, key) and self.same(wanted, value):
                    del like[index]
                    return True
        return False

    def _same_key(self, expected: Any, found: Any) -> bool:
        if not self._as_python and isinstance(expected, str) and type(found) is int:
            return expected == str(found)
        return self.same(expected, found)

    def _label(self, key: Any) -> str:
        """A text that is the same for equal keys, so that not all pairs must be compared."""
        if isinstance(key, str):
            return f"s{key}"
        number = isinstance(key, int) or (isinstance(key, float) and math.isfinite(key))
        if number and self._tolerance is None:
            return f"n{int(key):x}"
        if isinstance(key, tuple):
            return f"t({','.join(map(self._label, key))})"
        return "other"


def same_text(expected: str, found: str, tolerance: float | None = None) -> bool:
    """True if the output of a program is the expected one.

    Args:
        tolerance: largest difference of two numbers, as in `Rules`. None: exact.
    """
    wanted, given = _lines(expected), _lines(found)
    return len(wanted) == len(given) and all(
        _same_line(one, other, tolerance) for one, other in zip(wanted, given, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.rstrip().split("\n")]


def _same_line(expected: str, found: str, tolerance: float | None) -> bool:
    if expected == found:
        return True
    wanted, given = expected.split(), found.split()
    return len(wanted) == len(given) and all(
        one == other or _same_number(one, other, tolerance)
        for one, other in zip(wanted, given, strict=True)
    )


def _same_number(expected: str, found: str, tolerance: float | None) -> bool:
    if max(len(expected), len(found)) > _LONGEST_NUMBER:
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)):
        return False
    if tolerance is not None:
        return _within(float(expected), float(found), tolerance)
    # Text of digits alone may be a code such as 007: then every character counts.
    return not expected.lstrip("+-").isdigit() and Decimal(expected) == Decimal(found)


def _within(expected: int | float, found: int | float, tolerance: float) -> bool:
    if expected == found:
        return True
    try:
        difference = abs(float(expected) - float(found))
        return difference <= tolerance * max(1.0, abs(float(expected)))
    except OverflowError:
        return False


def _number(found: Any) -> int | float | None:
    """The number that the JSON represents, or None if it represents something else."""
    if type(found) is int:
        return found
    if isinstance(found, dict):
        try:
            if isinstance(body := found.get("f"), str):
                return float.fromhex(body)
            if isinstance(body := found.get("i"), str):
                return int(body, 16)
        except (ValueError, OverflowError):
            return None
    return None


def _shape(found: Any) -> Any:
    """The key that the JSON represents, if it is text, a number or a tuple of these."""
    number = None if isinstance(found, bool) else _number(found)
    if number is not None:
        return number
    if isinstance(found, dict) and isinstance(parts := found.get("t"), list):
        return tuple(map(_shape, parts))
    return found


def _complex(found: Any) -> complex | None:
    match found:
        case {"c": [str(real), str(imaginary)]}:
            try:
                return complex(float.fromhex(real), float.fromhex(imaginary))
            except (ValueError, OverflowError):
                return None
    return None
