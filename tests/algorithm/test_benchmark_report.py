"""The statistics of `benchmarks/algorithms/report.py`, by hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sixfold.evaluation.statistics import Interval


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "algorithms" / "report.py"
    spec = importlib.util.spec_from_file_location("algorithms_report", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*heldout: tuple[int, float], **columns: Any) -> dict[str, Any]:
    return {"heldout": list(heldout), **columns}


def test_samples_to_a_target_are_read_off_a_straight_line(report: ModuleType) -> None:
    curve = run((0, 0.2), (100, 0.6), (200, 0.5), (300, 0.9))
    assert report.samples_to(curve, 0.4) == pytest.approx(50)
    assert report.samples_to(curve, 0.7) == pytest.approx(250)
    assert report.samples_to(curve, 0.95) is None
    assert report.samples_to(run((0, 0.8), (100, 0.9)), 0.7) == pytest.approx(0)
    assert report.gain(curve) == pytest.approx(0.7)


def test_a_paired_difference_takes_the_seeds_apart(report: ModuleType) -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 4.303 at 2 degrees of freedom.
    Seed 9 has no partner.
    """
    a = {1: run(x=10), 2: run(x=200), 3: run(x=3000), 9: run(x=5)}
    b = {1: run(x=9), 2: run(x=198), 3: run(x=2997)}
    found = report.paired(a, b, lambda r: r["x"])
    assert found == pytest.approx((2, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)), rel=1e-3)


def test_a_ratio_is_a_geometric_mean(report: ModuleType) -> None:
    """Ratios 2 and 8: geometric mean 4, factor exp(12.706 * log(2)) either way (t at 1 degree of
    freedom, standard error log 2).
    """
    a = {1: run(x=20), 2: run(x=80), 3: run(x=7)}
    b = {1: run(x=10), 2: run(x=10)}
    mean, low, high = report.ratio(a, b, lambda r: r["x"])
    assert (mean, math.log(high / 4), math.log(4 / low)) == pytest.approx(
        (4, 12.706 * math.log(2), 12.706 * math.log(2)), rel=1e-3
    )
    assert report.ratio({1: run(x=3)}, b, lambda r: r["x"])[1:] == (0.0, math.inf)


def test_the_ends_of_a_run_leave_out_steps_without_a_value(report: ModuleType) -> None:
    values = [None, 1.0, 2.0, None, 3.0, 4.0, 5.0, *[100.0] * 20, None]
    assert report.early(values) == 3.0
    assert report.late(values) == 100.0


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        (Interval(2, 1, 3), "yes"),
        (Interval(-2, -3, -1), "no: the opposite"),
        (Interval(1, -1, 3), "not shown"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(
    report: ModuleType, interval: Interval, word: str
) -> None:
    assert report.verdict(interval).startswith(word)
    assert report.verdict(
        interval._replace(low=interval.low + 10, high=interval.high + 10), 10.0
    ).startswith(word)


def test_a_curve_is_the_mean_of_seeds_and_a_gap_where_none_is_known(report: ModuleType) -> None:
    arm = {0: run(ys=[(0, 1.0), (10, 3.0)]), 1: run(ys=[(0, 3.0), (5, 5.0), (10, None)])}
    line = report.curve(arm, lambda r: r["ys"], [0, 5, 10, 15], "name", 2)
    assert line.points == [(0, 2.0), (5, 3.5), (10, 3.0), (15, None)]
    assert [x for x, *_ in line.band] == [0, 5]
