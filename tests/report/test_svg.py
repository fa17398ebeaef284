"""Charts put values where the axes say, and leave gaps where there is nothing."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.report.numbers import percent
from sixfold.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Line,
    area_chart,
    histogram,
    line_chart,
)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    shapes = [element for element in root.iter() if element.tag in ("polyline", "polygon")]
    return [
        [
            (float(x), float(y))
            for x, y in re.findall(r"([-\d.]+),([-\d.]+)", shape.attrib["points"])
        ]
        for shape in shapes
    ]


def test_corners_of_the_data_are_corners_of_the_plot() -> None:
    svg = line_chart([Line("a", [(1, 0.0), (2, 0.5), (3, 1.0)])], limits=(0.0, 1.0))
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert polylines(svg) == [
        [(LEFT, HEIGHT - BOTTOM), (middle, (TOP + HEIGHT - BOTTOM) / 2), (WIDTH - RIGHT, TOP)]
    ]


def test_a_value_that_is_not_finite_breaks_the_curve() -> None:
    points = [(1, 0.0), (2, 0.1), (3, None), (4, 0.3), (5, 0.4), (6, math.nan), (7, 0.5)]
    svg = line_chart([Line("loss", points)])
    assert [len(line) for line in polylines(svg)] == [2, 2]
    assert svg.count("<circle") == 1, "a single point between gaps is a dot"
    assert "step 3: loss not finite" in svg


def test_a_logarithmic_axis_is_linear_in_the_exponent() -> None:
    frame = Frame(0, 1, 1e-8, 1e-4, log=True)
    gaps = {round(frame.y(10.0**-p) - frame.y(10.0 ** -(p - 1)), 0) for p in (8, 7, 6, 5)}
    assert len(gaps) == 1 and frame.y(1e-8) == HEIGHT - BOTTOM
    svg = line_chart([Line("gap", [(1, 0.0), (2, 1e-6), (3, 2e-6)])], log=True)
    assert [len(line) for line in polylines(svg)] == [2]


def test_areas_stack() -> None:
    svg = area_chart([Line("a", [(1, 1.0), (2, 1.0)]), Line("b", [(1, 1.0), (2, 3.0)])])
    bottom, top = polylines(svg)
    assert bottom[:2] == top[:1:-1], "the second layer stands on the first"
    assert top[1] == (WIDTH - RIGHT, TOP), "the sum of 4 is the top of the axis"


def test_bars_are_as_tall_as_their_counts() -> None:
    root = ElementTree.fromstring(histogram([1, 4, 0], (-1.0, 1.0), "tokens"))
    heights = [
        float(bar.attrib["height"]) for bar in root.iter("rect") if "fill" in bar.attrib["class"]
    ]
    assert heights == pytest.approx(
        [(HEIGHT - TOP - BOTTOM) / 4, HEIGHT - TOP - BOTTOM, 0.0], abs=0.1
    )
    assert "not measured" in histogram([], (-1.0, 1.0), "tokens")


@pytest.mark.slow
@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=8),
    st.booleans(),
)
def test_any_values_make_a_chart_within_its_plot(values: list[float | None], log: bool) -> None:
    svg = line_chart([Line("x", list(enumerate(values)))], log=log)
    for line in polylines(svg):
        assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in line)


def test_labels_are_escaped() -> None:
    svg = line_chart([Line("</svg><script>", [(1, 1.0), (2, 2.0)])])
    assert "<script" not in svg and "&lt;script&gt;" in svg


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [([0.0, 0.0], "0%", "100%"), ([0.0, 0.25], "0%", "20%"), ([-0.5, 0.5], "-50%", "50%")],
)
def test_an_axis_goes_below_zero_only_for_values_that_do(
    values: list[float], lowest: str, highest: str
) -> None:
    """A constant 0 had an axis of -100 % to 100 %."""
    root = ElementTree.fromstring(
        line_chart([Line("a", list(enumerate(values, start=1)))], percent)
    )
    labels = [node.text for node in root.iter() if node.get("text-anchor") == "end"]
    assert (labels[0], labels[-1]) == (lowest, highest)
