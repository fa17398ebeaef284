"""Exact values of numbers as answers spell them. No CAS and no floats are used."""

from __future__ import annotations

import re
from fractions import Fraction

_SIGN = r"[+-]?"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(rf"{_SIGN}{_DECIMAL}")
_SCIENTIFIC = re.compile(
    rf"({_SIGN}{_DECIMAL})(?:[eE]([+-]?\d{{1,3}})|\s*(?:\\times|\\cdot|\*|x)\s*10\^(?:\{{([+-]?\d{{1,3}})\}}|(\d)))"
)
_POWER = re.compile(r"([+-]?)(\d{1,6})\^(?:\{([+-]?\d{1,3})\}|(\d))")
_RATIO = re.compile(
    rf"({_SIGN})\\frac\s*(?:\{{\s*({_SIGN}\s*{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_SIGN}\s*{_DECIMAL})\s*\}}|(\d))"
)
_SLASH = re.compile(rf"({_SIGN}{_DECIMAL})\s*/\s*({_SIGN}{_DECIMAL})")
_MIXED = re.compile(
    rf"({_SIGN})(\d+)(?:\s*\\frac\s*(?:\{{\s*(\d+)\s*\}}|(\d))\s*(?:\{{\s*(\d+)\s*\}}|(\d))|\s+(\d+)/(\d+))"
)
_REPEATING = re.compile(
    rf"({_SIGN})(\d{{0,60}})\.(\d{{0,60}})(?:\\(?:overline|bar|dot)\s*\{{(\d{{1,60}})\}}|\\dot\s*\{{(\d)\}}(\d{{0,60}})\\dot\s*\{{(\d)\}})"
)
_CONTINUED = re.compile(rf"({_SIGN})(\d{{0,60}})\.(\d{{3,60}})\s*\\[lc]?dots")
_BASED = re.compile(
    r"\(?\s*(?P<digits>[0-9A-Za-z]{1,200})\s*\)?\s*_\s*\{?\s*(?:\\text\s*)?[{(]?\s*"
    r"(?P<base>\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\s*[})]{0,2}\}?"
)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip


def exact_number(text: str) -> Fraction | None:
    r"""The value of a literal, or None if the text is not one (also for n/0).

    Literals are 12, -0.5, 1,000, 3/4, \frac{3}{4}, 1\frac{1}{2}, 1.5e3, 1.5\times 10^3 and
    10^{-9}.
    """
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    if re.match(r"[+-]\s+[\d.\\]", text):
        text = text[0] + text[1:].lstrip()
    if _PLAIN.fullmatch(text):
        return _fraction(text)
    if m := _SCIENTIFIC.fullmatch(text):
        return _fraction(m[1]) * Fraction(10) ** int(m[2] or m[3] or m[4])
    if m := _POWER.fullmatch(text):
        base, exponent = int(m[2]), int(m[3] or m[4])
        return (
            None
            if base == 0 and exponent <= 0
            else Fraction(f"{m[1]}1") * Fraction(base) ** exponent
        )
    if m := _RATIO.fullmatch(text):
        return _ratio(Fraction(f"{m[1]}1"), m[2] or m[3], m[4] or m[5])
    if m := _SLASH.fullmatch(text):
        return _ratio(Fraction(1), m[1], m[2])
    if m := _MIXED.fullmatch(text):
        part = _ratio(Fraction(1), m[3] or m[4] or m[7], m[5] or m[6] or m[8])
        return None if part is None else Fraction(f"{m[1]}1") * (int(m[2]) + part)
    return _repeating_decimal(text)


def number_in_base(text: str) -> tuple[str, int] | None:
    r"""Digits and base of a number such as `1011_2` or `(2A)_{16}`, or None.

    None also if a digit does not exist in the base: `x_2` and `a_1` are names.
    """
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    digits = match["digits"].upper().lstrip("0") or "0"
    base = _BASES.get(match["base"]) or int(match["base"])
    is_number = digits[0].isdigit() or base > 10
    return (digits, base) if is_number and _are_digits(digits, base) else None


def _are_digits(digits: str, base: int) -> bool:
    return 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits)


def _repeating_decimal(text: str) -> Fraction | None:
    r"""Value of `0.1\overline{6}`, `0.\dot{3}` or `0.333\ldots`, or None.

    Digits before dots must end in a block that occurs three times, or twice if it has several
    digits: `3.14159\ldots` is an approximation.
    """
    if m := _REPEATING.fullmatch(text):
        sign, whole, fixed, block = m[1], m[2], m[3], m[4] or f"{m[5]}{m[6]}{m[7]}"
    elif m := _CONTINUED.fullmatch(text):
        sign, whole, digits = m[1], m[2], m[3]
        block = _repeated_block(digits)
        fixed = digits[: len(digits) - len(block)]
        if not block:
            return None
    else:
        return None
    exact = Fraction(int(f"{whole}{fixed}" or "0"), 10 ** len(fixed))
    tail = Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(fixed))
    return Fraction(f"{sign}1") * (exact + tail)


def _repeated_block(digits: str) -> str:
    """The shortest block that repeats at the end of `digits`, or empty."""
    for size in range(1, len(digits) // 2 + 1):
        block, times = digits[-size:], 3 if size == 1 else 2
        if digits.endswith(block * times):
            return block
    return ""


def _ratio(sign: Fraction, numerator: str, denominator: str) -> Fraction | None:
    bottom = _fraction(denominator)
    return sign * _fraction(numerator) / bottom if bottom else None


def _fraction(literal: str) -> Fraction:
    literal = literal.replace(",", "").replace(" ", "")
    return Fraction(literal + "0" if literal.endswith(".") else literal)
