"""Numbers as text: short numbers, percentages, intervals, durations. Standard library only."""

from __future__ import annotations


def number(value: float) -> str:
    """The number with three significant digits: 0.413, 1.84k, 2.1e-6."""
    size = abs(value)
    if size >= 1e4:
        power, letter = (1e9, "G") if size >= 1e9 else (1e6, "M") if size >= 1e6 else (1e3, "k")
        return f"{value / power:.3g}{letter}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}" if size >= 1e3 else f"{value:.3g}"


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage, with `digits` decimals: 57.4%. Never -0%."""
    return f"{_rounded(100 * share, digits):.{digits}f}%"


def percent_range(low: float, high: float) -> str:
    """An interval of a share: 53.1% to 61.6%."""
    return f"{percent(low)} to {percent(high)}"


def points(difference: float) -> str:
    """A difference of two shares in percentage points, with its sign: +27.5."""
    return f"{_rounded(100 * difference, 1):+.1f}"


def p_value(p: float) -> str:
    """A p-value with two significant digits: p = 0.012, p < 1e-6."""
    return "p < 1e-6" if p < 1e-6 else f"p = {p:.2g}"


def clock(seconds: float) -> str:
    """Seconds as 0:42, 12:05 or 3:07:00."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _rounded(value: float, digits: int) -> float:
    return round(value, digits) + 0.0  # adding 0.0 turns -0.0 into 0.0
