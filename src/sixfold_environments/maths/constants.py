"""Values of constant expressions to 450 digits, in bounded time and memory.

Two constants are equal if they agree in all digits. An answer has at most 400 characters, so no
decimal or fraction in it can come that close to a different number. This is faster than
simplification. It also knows identities that simplification does not find (roots of unity, exact
values of sine and cosine).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

DIGITS = 450
_GUARD = 50  # digits that rounding may lose
MAX_LOGARITHM = 10**6
MAX_FACTORIAL = 999


class Undefined(ArithmeticError):
    """The expression has no value, or its value is out of bounds."""


class NotConstant(Exception):
    """The expression contains a part that this module does not evaluate."""


def same_value(left: Any, right: Any) -> bool | None:
    """True if two sympy expressions have the same value. None if one of them is not a constant."""
    from mpmath import mp

    with mp.workdps(DIGITS):
        try:
            a, b = _value(left), _value(right)
        except NotConstant:
            return None
        except Undefined:
            return False
        if a == 0 or b == 0:
            return bool(a == b)
        return bool(abs(a - b) <= mp.mpf(10) ** -(DIGITS - _GUARD) * max(abs(a), abs(b)))


@lru_cache(maxsize=4096)  # the K samples of a task share its reference answer
def _value(expression: Any) -> Any:
    """Value as an mpmath number at the current precision, which is always `DIGITS`."""
    name = type(expression).__name__
    if expression.is_Rational:
        from mpmath import mp

        return mp.mpf(int(expression.p)) / int(expression.q)
    if expression.is_Symbol and expression.name != "i":
        raise NotConstant
    if name not in _RULES:
        raise NotConstant(name)
    value = _RULES[name](*[_value(argument) for argument in expression.args])
    return _tidy(value)


def _tidy(value: Any) -> Any:
    """Remove a real or imaginary part that is only rounding error.

    It would select the wrong branch of a root.
    """
    from mpmath import mp

    if not isinstance(value, mp.mpc):
        return value
    if not (mp.isfinite(value.real) and mp.isfinite(value.imag)):
        raise Undefined
    small = mp.mpf(10) ** -(DIGITS - _GUARD) * abs(value)
    real = value.real if abs(value.real) > small else mp.mpf(0)
    return mp.mpc(real, value.imag) if abs(value.imag) > small else real


def _sum(*terms: Any) -> Any:
    from mpmath import mp

    total = sum(terms, mp.mpf(0))
    largest = max((abs(term) for term in terms), default=mp.mpf(0))
    return mp.mpf(0) if abs(total) <= mp.mpf(10) ** -(DIGITS - _GUARD) * largest else total


def _product(*factors: Any) -> Any:
    from mpmath import mp

    result = mp.mpf(1)
    for factor in factors:
        result *= factor
    return result


def _power(base: Any, exponent: Any) -> Any:
    from mpmath import mp

    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined
        return mp.mpf(0)
    if abs(exponent * mp.log(abs(base))) > MAX_LOGARITHM or abs(exponent) > MAX_LOGARITHM:
        raise Undefined
    if exponent == mp.nint(mp.re(exponent)):
        return base ** int(mp.nint(mp.re(exponent)))
    return mp.power(base, exponent)


def _exponential(argument: Any) -> Any:
    from mpmath import mp

    if abs(argument) > MAX_LOGARITHM:
        raise Undefined
    return mp.exp(argument)


def _logarithm(argument: Any, base: Any = None) -> Any:
    from mpmath import mp

    if argument == 0:
        raise Undefined
    if base is None:
        return mp.log(argument)
    if base in (0, 1):
        raise Undefined
    return mp.log(argument) / mp.log(base)


def _function(name: str) -> Callable[[Any], Any]:
    """A function of mpmath. Values that differ from 0 only by rounding become 0.

    The returned function raises Undefined at poles.
    """

    def apply(argument: Any) -> Any:
        from mpmath import mp

        if abs(argument) > MAX_LOGARITHM:
            raise Undefined
        try:
            value = getattr(mp, name)(argument)
        except (ValueError, ZeroDivisionError) as error:
            raise Undefined from error
        return (
            mp.mpf(0)
            if abs(value) <= mp.mpf(10) ** -(DIGITS - _GUARD) * max(1, abs(argument))
            else value
        )

    return apply


def _ratio(above: Callable[[Any], Any] | None, below: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function such as tan = sin / cos, so that a pole is a division by an exact 0."""

    def apply(argument: Any) -> Any:
        from mpmath import mp

        divisor = below(argument)
        if divisor == 0:
            raise Undefined
        return (above(argument) if above else mp.mpf(1)) / divisor

    return apply


def _factorial(argument: Any) -> Any:
    from mpmath import mp

    if argument != mp.nint(mp.re(argument)) or not 0 <= mp.re(argument) <= MAX_FACTORIAL:
        raise Undefined
    return mp.factorial(argument)


def _binomial(above: Any, below: Any) -> Any:
    from mpmath import mp

    if any(
        number != mp.nint(mp.re(number)) or not 0 <= mp.re(number) <= MAX_FACTORIAL
        for number in (above, below)
    ):
        raise Undefined
    return mp.nint(mp.binomial(above, below))


def _number(name: str) -> Callable[[], Any]:
    def apply() -> Any:
        from mpmath import mp

        return +getattr(mp, name)

    return apply


def _imaginary_unit(*_: Any) -> Any:
    from mpmath import mp

    return mp.mpc(0, 1)


_SIN, _COS, _SINH, _COSH = _function("sin"), _function("cos"), _function("sinh"), _function("cosh")
_RULES: dict[str, Callable[..., Any]] = {
    "Add": _sum, "Mul": _product, "Pow": _power, "exp": _exponential, "log": _logarithm, "Abs": abs,
    "UnevaluatedExpr": lambda value: value,
    "Pi": _number("pi"), "Exp1": _number("e"), "ImaginaryUnit": _imaginary_unit,
    "Symbol": _imaginary_unit,
    "sin": _SIN, "cos": _COS, "tan": _ratio(_SIN, _COS), "cot": _ratio(_COS, _SIN),
    "sec": _ratio(None, _COS), "csc": _ratio(None, _SIN),
    "sinh": _SINH, "cosh": _COSH, "tanh": _ratio(_SINH, _COSH), "asin": _function("asin"),
    "acos": _function("acos"), "atan": _function("atan"),
    "factorial": _factorial, "binomial": _binomial,
}  # fmt: skip
"""sympy class name -> function from the values of the arguments to the value of the expression."""
