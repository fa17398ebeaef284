"""Equality of two expressions by math-verify, behind limits that keep the CAS from hanging. Model text is parsed, never evaluated as code.

Run it in a process that can be killed: the limits stop what is known to hang, and the CAS knows more ways. math-verify's own timeouts are
off, because they use SIGALRM, which works in the main thread only and cancels anybody else's alarm.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

MAX_CHARACTERS = 400
MAX_DEPTH = 10
MAX_NESTED_FUNCTIONS = 3
MAX_BARS = 8
MAX_OPERATORS = 80
MAX_EXPONENT_DIGITS = 3
MAX_INTEGER_DIGITS = 60

_COMMAND_NAMES = """
    frac sqrt pi cdot times div pm mp infty cup cap le ge lt gt ne neq in notin text begin end sin cos tan cot sec csc arcsin arccos
    arctan sinh cosh tanh log ln exp binom circ emptyset mathbb mathcal setminus langle rangle lfloor rfloor lceil rceil lvert rvert
    vert mid alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma
    Delta Theta Lambda Sigma Phi Psi Omega overline bar hat vec mathbf ldots dots cdots quad to ast star prime land lor
"""
_KNOWN_COMMANDS = frozenset(_COMMAND_NAMES.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_FUNCTION = re.compile(r"\\(?:a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp)(?![A-Za-z])|[^\s]")
_ALIEN = re.compile(r"""["`;@#$]|__|\.\s*[A-Za-z_]""")  # of no formula, and of much code
_DECIMAL_POINT = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_JOINED_DIGITS = re.compile(r"(?<![\d_^])\d+\s+\d")  # the parser adds them: 3 for "1 2"


def equal_by_algebra(answer: str, gold: str) -> bool:
    """Whether two normalised expressions are equal for math-verify (gold first: a set may answer an inequality, not the reverse).

    Exact: a decimal is the rational that it spells, never an approximation. An answer beyond the limits, undefined, or with a symbol that
    the gold lacks is not equal.
    """
    from math_verify import verify

    if not _within_limits(answer):
        return False
    gold_expression, answer_expression = _parsed(_exact(gold)), _parsed(_exact(answer))
    if gold_expression is None or answer_expression is None or not _same_kind(answer_expression, gold_expression):
        return False
    if _differ_in_value(answer_expression, gold_expression):
        return False
    return bool(verify(gold_expression, answer_expression, timeout_seconds=None))


def _within_limits(text: str) -> bool:
    if len(text) > MAX_CHARACTERS or _ALIEN.search(text) or _JOINED_DIGITS.search(text):
        return False
    if not _KNOWN_COMMANDS.issuperset(_COMMAND.findall(text)):  # \sum, \int, \prod and \lim are questions; \input is an attack
        return False
    if sum(text.count(operator) for operator in "+-*/^,=") > MAX_OPERATORS or text.count("|") > MAX_BARS:
        return False
    if _depth(text) > MAX_DEPTH or _nested_functions(text) > MAX_NESTED_FUNCTIONS:
        return False
    if any(len(digits) > MAX_INTEGER_DIGITS for digits in re.findall(r"\d+", text)):
        return False
    return _powers_are_small(text) and _factorials_are_small(text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def _nested_functions(text: str) -> int:
    """How deep functions stand inside functions: 2 for \\sin(\\cos x). simplify() needs time exponential in it."""
    deepest = depth = waiting = 0  # waiting: functions whose argument has not begun
    opened: list[int] = []
    for token in _FUNCTION.findall(text):
        if len(token) > 1:
            waiting += 1
            deepest = max(deepest, depth + waiting)
        elif token in "{([":
            opened.append(waiting)
            depth, waiting = depth + waiting, 0
        elif token in "})]":
            depth -= opened.pop() if opened else 0
        elif token.isalpha() or token in "+-=,*/":
            waiting = 0
    return deepest


def _powers_are_small(text: str) -> bool:
    """No exponent of more than three digits, no tower of numbers, and no stack of brackets whose exponents multiply beyond three digits."""
    stacked = 1
    for match in re.finditer(r"\^|\*\*", text):
        exponent = _group_after(text, match.end())
        digits = re.findall(r"\d+", exponent)
        if any(len(d) > MAX_EXPONENT_DIGITS for d in digits) or "!" in exponent:
            return False
        powers = [_group_after(exponent, inner.end()) for inner in re.finditer(r"\^|\*\*", exponent)]
        is_number = not re.search(r"[A-Za-z]", _COMMAND.sub("", exponent))
        if (powers and digits[1:] and is_number) or any("^" in power or "*" in power for power in powers):
            return False
        if text[: match.start()].rstrip().endswith((")", "}", "]")) and digits:
            stacked *= max(int(d) for d in digits)
    return stacked < 10**MAX_EXPONENT_DIGITS


def _group_after(text: str, start: int) -> str:
    """The exponent that starts at `start`: a bracketed group, or up to the next operator."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if text[start : start + 1] not in ("{", "("):
        return re.split(r"[+*/=,\s)}]", text[start:], maxsplit=1)[0]
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in "{(") - (text[end] in "})")
        if depth == 0:
            return text[start : end + 1]
    return text[start:]


def _factorials_are_small(text: str) -> bool:
    """A factorial only of a literal of at most three digits; binomials only of such."""
    if "!" not in text and "\\binom" not in text:
        return True
    return not re.search(r"(?:[^\d]|\d{4,})\s*!|![\s!]*!", text) and not re.search(r"\d{4,}", text)


def _exact(text: str) -> str:
    """Decimals as fractions, so that nothing in the CAS is a float and nothing is equal only to six digits."""
    return _DECIMAL_POINT.sub(lambda m: rf"\frac{{{int((m[1] + m[2]) or '0')}}}{{{10 ** len(m[2])}}}", text)


def _same_kind(answer: Any, gold: Any) -> bool:
    """False where equality by numbers would lie: nan, a rational against an irrational, a symbol that the gold does not have."""
    from sympy import Expr, nan, zoo

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return True
    if answer.has(nan, zoo) or {answer.is_rational, gold.is_rational} == {True, False}:
        return False
    return bool(answer.free_symbols <= gold.free_symbols)


def _differ_in_value(answer: Any, gold: Any) -> bool:
    """True where 15 digits at one point tell two expressions apart. The point of it is speed: simplify() takes seconds to find no equality."""
    from sympy import Expr, Float

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return False
    point = {symbol: Float(f"0.{37 + 16 * i}") for i, symbol in enumerate(sorted(gold.free_symbols, key=str))}
    try:
        left, right = complex(answer.subs(point).evalf(15)), complex(gold.subs(point).evalf(15))
    except (TypeError, ValueError, OverflowError):  # no number at that point, or one beyond a double: algebra decides
        return False
    return abs(left - right) > 1e-9 * (1 + abs(right))


@lru_cache(maxsize=4096)  # the K samples of a task share its gold, and many of them an answer
def _parsed(latex: str) -> Any:
    """A sympy object, or None where math-verify's LaTeX parser finds none."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    config = LatexExtractionConfig(boxed_match_priority=-1)
    found = parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None
