"""Sizes of units, to compare quantities in different units: 100 cm is 1 m."""

from __future__ import annotations

from fractions import Fraction

from .units import Quantity

_INCH = Fraction(254, 10000)
_SIZES = {
    "length": {
        "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "dm": Fraction(1, 10), "m": Fraction(1),
        "km": Fraction(1000), "in": _INCH, "ft": 12 * _INCH, "yd": 36 * _INCH,
        "mi": 63360 * _INCH,
    },
    "mass": {"mg": Fraction(1, 1000), "g": Fraction(1), "kg": Fraction(1000)},
    "time": {
        "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600),
        "day": Fraction(86400), "week": Fraction(604800),
    },
    "volume": {"ml": Fraction(1, 1000), "l": Fraction(1)},
}  # fmt: skip
_COMPOUND = {"mph": "mi/h"}


def same_size(left: Quantity, right: Quantity) -> bool:
    """True if two quantities with exact values have units of one kind, and are equal."""
    a, b = _size(left.unit), _size(right.unit)
    if a is None or b is None or a[0] != b[0] or left.value is None or right.value is None:
        return False
    return left.value * a[1] == right.value * b[1]


def _size(unit: str) -> tuple[str, Fraction] | None:
    """Kind of a canonical unit, and its size in the basic unit of the kind. None if unknown."""
    above, per, below = _COMPOUND.get(unit, unit).partition("/")
    if per:
        top, bottom = _size(above), _size(below)
        return (f"{top[0]}/{bottom[0]}", top[1] / bottom[1]) if top and bottom else None
    power = int(above[-1]) if above[-1:] in ("2", "3") else 1
    name = above.rstrip("23")
    for kind, sizes in _SIZES.items():
        if name in sizes:
            return f"{kind}{power}", sizes[name] ** power
    return None
