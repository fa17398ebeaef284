"""Equality of two expressions by math-verify, within limits that keep the CAS from hanging.

Text of the model is parsed, never evaluated as code. Limits on the text stop expressions known to
hang; a limit on CPU time stops the rest. Still run it in a process that can be killed: no limit
inside a process stops a single long operation on integers. math-verify's own timeouts are off: they
cancel alarms that other code has set.
"""

from __future__ import annotations

import logging
import re
import time
from functools import lru_cache
from typing import Any

from sixfold.checks.limits import OutOfTime, blame_answer, cpu_limit

from .constants import same_value

MAX_SECONDS = 1.5  # CPU time of one whole check; almost all take less than a tenth
MAX_GOLD_SECONDS = 5.0  # of CPU time
MAX_CHARACTERS = 400
MAX_DEPTH = 10
MAX_NESTED_FUNCTIONS = 3
MAX_BARS = 8
MAX_OPERATORS = 80
MAX_EXPONENT_DIGITS = 3
MAX_INTEGER_DIGITS = 60

_COMMAND_NAMES = """
    frac sqrt pi cdot times div pm mp infty cup cap le ge lt gt ne neq in notin text begin end sin
    cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp binom circ emptyset mathbb
    mathcal setminus langle rangle lfloor rfloor lceil rceil lvert rvert vert mid alpha beta gamma
    delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi
    omega Gamma Delta Theta Lambda Sigma Phi Psi Omega overline bar hat vec mathbf
    quad to ast star prime land lor
"""
_KNOWN_COMMANDS = frozenset(_COMMAND_NAMES.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_FUNCTION = re.compile(r"\\(?:a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp)(?![A-Za-z])|[^\s]")
_ALIEN = re.compile(r"""["`;@#$]|__|\.\s*[A-Za-z_]""")  # found in no formula, and in much code
_BINOMIAL = re.compile(r"\\binom\s*(?:\{\s*\d{1,3}\s*\}|\d)\s*(?:\{\s*\d{1,3}\s*\}|\d)")
_DEGREES = re.compile(
    r"(\d+(?:\.\d+)?|\.\d+|\{\s*\d+(?:\.\d+)?\s*\})\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
)
_WORD_IN_TEXT = re.compile(r"\\text\s*\{(?!\s*(?:or|and|[eix]|cis)\s*\})")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d\s*\}\s*\{\s*d")
_UPRIGHT = re.compile(r"\\text\s*\{\s*([eix])\s*\}")
_CIS = re.compile(r"\\text\s*\{\s*cis\s*\}\s*(\([^()]*\)|\{[^{}]*\})")
_DECIMAL_POINT = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_SKIPPED = re.compile(r"'|\^\s*\{?\s*(?:T|[-+*]|\\(?:ast|star|dagger))\s*(?![\w(\\{\s])")
_JOINED_DIGITS = re.compile(r"(?<![\d_^])\d+\s+\d")  # the parser adds them: 3 for "1 2"


class BadReference(Exception):
    """The CAS fails on the reference answer: the task is at fault, not the answer."""


@lru_cache(maxsize=1)
def load_cas() -> None:
    """Import the CAS, and use its parts once: the first time takes a second or two."""
    from math_verify import verify

    _parse(r"(e^{2x})^2-\sin(3y)")  # a first parse of each construct builds tables of the parser
    left, right = _parse("x+y=3"), _parse(r"3=y+\frac{\sqrt{4}}{2}x")
    verify(left, right, timeout_seconds=None)


class Budget:
    """CPU seconds left for all comparisons of one check."""

    seconds = MAX_SECONDS


def equal_by_algebra(answer: str, gold: str, budget: Budget | None = None) -> bool:
    """True if the CAS finds two normalised expressions equal.

    The comparison is exact: a decimal is the rational that it spells, never an approximation. An
    answer is not equal if it exceeds the limits, is undefined, has a symbol that the gold lacks, or
    makes the CAS fail.

    Args:
        budget: CPU time left for this check. None: a new budget.

    Raises:
        BadReference: if the CAS fails on the gold.
        OutOfTime: if the budget is spent.
    """
    if not _within_limits(answer) or ("\\infty" in answer and "\\infty" not in gold):
        return False
    if _WORD_IN_TEXT.search(answer) and not _WORD_IN_TEXT.search(gold):
        return False  # the parser skips words: "5 \text{ maybe}" would be 5
    if len(_SKIPPED.findall(answer)) != len(_SKIPPED.findall(gold)):
        return False  # the parser skips these marks: x' would be x, and A^T would be A
    gold_expression = _parsed_gold(gold)
    blame_answer()
    budget = budget or Budget()
    start = time.thread_time()
    if budget.seconds <= 0:
        raise OutOfTime
    try:
        with cpu_limit(budget.seconds):
            return _equal(_parsed(_exact(answer)), gold_expression)
    except Exception:  # noqa: BLE001  the CAS may raise anything on text of a model
        return False
    finally:
        budget.seconds -= time.thread_time() - start


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> Any:
    load_cas()  # outside the limit
    try:
        with cpu_limit(MAX_GOLD_SECONDS):
            return _parsed(_exact(gold))
    except (Exception, OutOfTime) as error:
        raise BadReference(
            f"the reference answer {gold[:80]!r} cannot be parsed: {type(error).__name__}"
        ) from error


def _equal(answer: Any, gold: Any) -> bool:
    """Equality of two parsed expressions: constants by value, others by math-verify.

    The gold goes first: a set may answer an inequality, but not the reverse.
    """
    from math_verify import verify
    from sympy import Equality, Expr

    if gold is None or answer is None:
        return False
    if isinstance(answer, Equality) != isinstance(gold, Equality):
        return False  # math-verify would compare the right side of the equation alone
    answer, gold = _with_imaginary_unit(answer, gold)
    both = isinstance(gold, Expr) and isinstance(answer, Expr)
    if both and gold.free_symbols > answer.free_symbols:
        gold = gold.doit()  # x + 0y has no y
    by_value = _same_constant(answer, gold)
    if by_value is not None:
        return by_value
    if not _same_kind(answer, gold) or _differ_in_value(answer, gold):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def _same_constant(answer: Any, gold: Any) -> bool | None:
    """True if two constants have the same value.

    An answer without a value is not equal to anything.

    Returns:
        None if the expressions are not constants. They must then be compared in another way.
    """
    from sympy import Expr

    if not isinstance(answer, Expr):
        return None
    if not isinstance(gold, Expr):
        return False if same_value(answer, answer) is False else None
    return same_value(answer, gold)


def _with_imaginary_unit(answer: Any, gold: Any) -> tuple[Any, Any]:
    """Both sides with i as the imaginary unit and all other symbols real.

    This applies if either side has i and there is also a variable. The parser assumes variables to
    be real only where it sees no sign of complex numbers, so x on one side would differ from x on
    the other.
    """
    from sympy import Expr, I, Symbol

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return answer, gold
    names = {symbol.name for symbol in answer.free_symbols | gold.free_symbols}
    if "i" not in names or len(names) == 1:
        return answer, gold
    units = {
        s: I if s.name == "i" else Symbol(s.name, real=True)
        for s in answer.free_symbols | gold.free_symbols
    }
    return answer.xreplace(units), gold.xreplace(units)


def _within_limits(text: str) -> bool:
    if len(text) > MAX_CHARACTERS or _ALIEN.search(text) or _JOINED_DIGITS.search(text):
        return False
    if _DERIVATIVE.search(text):
        return False
    # \sum, \int, \prod and \lim are questions; \input is an attack.
    if not _KNOWN_COMMANDS.issuperset(_COMMAND.findall(text)):
        return False
    if (
        sum(text.count(operator) for operator in "+-*/^,=") > MAX_OPERATORS
        or text.count("|") > MAX_BARS
    ):
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
    r"""Nesting depth of functions: 2 for \sin(\cos x).

    simplify() takes time exponential in it.
    """
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
    """True if all powers are small enough to compute.

    Not allowed: an exponent of more than three digits, a tower of numbers, or stacked brackets
    whose exponents multiply to more than three digits.
    """
    stacked = 1
    for match in re.finditer(r"\^|\*\*", text):
        exponent = _group_after(text, match.end())
        digits = re.findall(r"\d+", exponent)
        if any(len(d) > MAX_EXPONENT_DIGITS for d in digits) or "!" in exponent:
            return False
        powers = [
            _group_after(exponent, inner.end()) for inner in re.finditer(r"\^|\*\*", exponent)
        ]
        is_number = not re.search(r"[A-Za-z]", _COMMAND.sub("", exponent))
        if (powers and digits[1:] and is_number) or any(
            "^" in power or "*" in power for power in powers
        ):
            return False
        if text[: match.start()].rstrip().endswith((")", "}", "]")) and digits:
            stacked *= max(int(d) for d in digits)
    return stacked < 10**MAX_EXPONENT_DIGITS


def _group_after(text: str, start: int) -> str:
    """The exponent that starts at `start`: a bracketed group, or text up to the next operator."""
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
    """True if factorials and binomials have only literals of at most three digits."""
    if "!" not in text and "\\binom" not in text:
        return True
    if len(_BINOMIAL.findall(text)) != text.count("\\binom"):
        return False
    return not re.search(r"(?:[^\d]|\d{4,})\s*!|![\s!]*!", text) and not re.search(r"\d{4,}", text)


def _exact(text: str) -> str:
    """Rewrite decimals as fractions, degrees as radians, and upright e and i as symbols.

    With decimals the CAS would use floats and compare only six digits.
    """
    if "\\text" in text:
        text = _UPRIGHT.sub(r"\1", _CIS.sub(r"e^{i\1}", text))
    text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    return _DECIMAL_POINT.sub(
        lambda m: rf"\frac{{{int((m[1] + m[2]) or '0')}}}{{{10 ** len(m[2])}}}", text
    )


def _same_kind(answer: Any, gold: Any) -> bool:
    """False where numerical equality would mislead.

    These are nan, a rational against an irrational, and a symbol that the gold does not have.
    """
    from sympy import Expr, nan, zoo

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return True
    if answer.has(nan, zoo) or {answer.is_rational, gold.is_rational} == {True, False}:
        return False
    return bool(answer.free_symbols <= gold.free_symbols)


def _differ_in_value(answer: Any, gold: Any) -> bool:
    """True if 15 digits at one point tell two expressions apart.

    It is a shortcut for speed: simplify() takes seconds to find no equality.
    """
    from sympy import Expr, Float

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return False
    point = {
        symbol: Float(f"0.{37 + 16 * i}")
        for i, symbol in enumerate(sorted(gold.free_symbols, key=str))
    }
    try:
        left, right = complex(answer.subs(point).evalf(15)), complex(gold.subs(point).evalf(15))
    except (TypeError, ValueError, OverflowError):
        # No number at that point, or one beyond a double: algebra decides.
        return False
    return abs(left - right) > 1e-9 * (1 + abs(right))


@lru_cache(maxsize=4096)  # the K samples of a task share its gold, and many of them an answer
def _parsed(latex: str) -> Any:
    """A sympy object, or None if math-verify's LaTeX parser finds none."""
    return _parse(latex)


def _parse(latex: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    config = LatexExtractionConfig(boxed_match_priority=-1)
    found = parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None
