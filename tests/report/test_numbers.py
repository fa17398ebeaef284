"""Numbers as text: rounding, signs and units."""

from __future__ import annotations

import math

import pytest

from sixfold.report.numbers import clock, number, p_value, percent, percent_range, points


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.4131, "0.413"),
        (-0.02, "-0.02"),
        (1.05e-4, "1.05e-4"),
        (1e-5, "1e-5"),
        (1834.4, "1834"),
        (96e3, "96k"),
        (2.5e6, "2.5M"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_percentages() -> None:
    shares = (0.0, 0.57421875, 1.0, -0.0001, 1.25, math.nan)
    assert [percent(s) for s in shares] == ["0.0%", "57.4%", "100.0%", "0.0%", "125.0%", "nan%"]
    assert (percent(0.574, 0), percent(0.001, 2)) == ("57%", "0.10%")
    assert percent_range(0.531, 0.616) == "53.1% to 61.6%"
    assert [points(d) for d in (0.2754, -0.031, -1e-9)] == ["+27.5", "-3.1", "+0.0"]


def test_small_p_values_are_bounds() -> None:
    assert [p_value(p) for p in (0.9876, 0.0123, 1e-12)] == ["p = 0.99", "p = 0.012", "p < 1e-6"]


def test_durations() -> None:
    assert [clock(s) for s in (0.4, 42, 725, 11220)] == ["0:00", "0:42", "12:05", "3:07:00"]
