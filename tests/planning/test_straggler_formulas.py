"""Longest sample of a rollout, straggler tax and length caps: published numbers."""

from __future__ import annotations

import math
import random

import pytest

from sixfold.errors import UserError
from sixfold.planning.stragglers import (
    cap_at_percentile,
    compare_longest,
    exact_longest,
    expected_longest,
    lognormal_sigma,
    percentile,
    straggler_tax,
)


@pytest.mark.parametrize(
    ("samples", "printed"),
    [
        (4, (2.0, 2.8, 3.7)),
        (16, (2.7, 5.0, 8.9)),
        (64, (3.5, 7.8, 17.4)),
        (256, (4.3, 11.3, 30.6)),
    ],
)
def test_printed_table(samples: int, printed: tuple[float, ...]) -> None:
    """L22b, in units of the mean."""
    found = [expected_longest(1, variation=c, samples=samples) for c in (0.5, 1, 2)]
    assert found == pytest.approx(printed, abs=0.1)


def test_doubling_samples_adds_26_percent() -> None:
    """Erratum E4: the formula gives 5.02 and 6.33, not +15 %."""
    longest = [expected_longest(1, variation=1, samples=k) for k in (16, 32)]
    assert longest == pytest.approx([5.02, 6.33], abs=0.005)
    assert longest[1] / longest[0] == pytest.approx(1.26, abs=0.005)


@pytest.mark.parametrize(
    ("sigma", "exact"),
    [
        (0.4, (1.0, 1.682418, 2.397461, 3.154798)),
        (0.8, (1.0, 2.576079, 5.080902, 8.692637)),
        (1.2, (1.0, 3.61597, 9.57, 20.99)),
    ],
)
def test_exact_expectation(sigma: float, exact: tuple[float, ...]) -> None:
    """Order statistics of log-normal lengths for 1, 8, 64 and 512 samples."""
    variation = math.sqrt(math.exp(sigma**2) - 1)
    assert lognormal_sigma(variation) == pytest.approx(sigma)
    found = [exact_longest(1, variation=variation, samples=n) for n in (1, 8, 64, 512)]
    assert found == pytest.approx(exact, rel=1e-5 if sigma < 1 else 5e-4)


def test_equal_lengths_have_no_straggler() -> None:
    assert expected_longest(800, variation=0, samples=64) == 800
    assert exact_longest(800, variation=0, samples=64) == pytest.approx(800, rel=1e-6)


@pytest.mark.parametrize(("variation", "samples"), [(0.5, 4), (1, 16)])
def test_trials_agree_with_the_integral(variation: float, samples: int) -> None:
    report = compare_longest(variation=variation, samples=samples, trials=4000, seed=0)
    assert abs(report.sampled - report.exact) < 4 * report.standard_error
    assert report.standard_error < 0.02 * report.exact
    assert report.bound > report.exact


def test_the_bound_is_43_percent_high_at_64_samples() -> None:
    """exp(0.8 * sqrt(2 ln 64) - 0.32) = 7.29 against 5.08."""
    variation = math.sqrt(math.exp(0.64) - 1)
    report = compare_longest(variation=variation, samples=64, trials=2, seed=0)
    assert report.excess == pytest.approx(7.293 / 5.0809 - 1, abs=0.001)


def test_percentile_interpolates() -> None:
    assert percentile([3, 1, 2, 4], 0.5) == 2.5
    assert percentile([10], 0.95) == 10
    assert percentile(range(1, 102), 0.95) == 96
    assert percentile([1, 2], 1) == 2


def test_percentile_of_16_is_below_the_maximum() -> None:
    """Erratum E4b: index floor(0.95 * 16) is the maximum, which caps nothing."""
    lengths = list(range(16))
    assert lengths[math.floor(0.95 * 16)] == max(lengths)
    assert percentile(lengths, 0.95) == 14.25


def test_straggler_tax() -> None:
    """L22b: a longest of 4,015 with a mean of 994 is a tax of 304 %."""
    lengths = [4015.0] + [(994 * 16 - 4015) / 15] * 15
    assert straggler_tax(lengths) == pytest.approx(3.04, abs=0.005)
    assert straggler_tax([5, 5, 5]) == 0


def test_cap_at_percentile() -> None:
    lengths = [100.0, 200.0, 300.0, 1000.0]
    cap = cap_at_percentile(lengths, fraction=0.95, pool=range(0, 501))
    assert cap.limit == 475
    assert cap.lengths == (100, 200, 300, 475)
    assert cap.truncated == 0.25
    assert cap.longest_saved == pytest.approx(1 - 475 / 1000)
    assert cap.tokens_saved == pytest.approx(1 - 1075 / 1600)
    assert cap.tax == pytest.approx(475 / (1075 / 4) - 1)


def test_cap_lowers_the_tax_of_a_lognormal_rollout() -> None:
    """L22b: a cap at p95 to p98 cuts the rollout time by 30 to 50 %."""
    sigma = lognormal_sigma(1)
    generator = random.Random(3)
    pool = [math.exp(generator.gauss(6, sigma)) for _ in range(2000)]
    saved = [
        cap_at_percentile(pool[i : i + 64], fraction=0.95, pool=pool).longest_saved
        for i in range(0, 1920, 64)
    ]
    assert 0.3 <= sum(saved) / len(saved) <= 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: percentile([], 0.5),
        lambda: percentile([1.0], 1.5),
        lambda: straggler_tax([]),
        lambda: straggler_tax([0.0, 0.0]),
        lambda: lognormal_sigma(-1),
        lambda: expected_longest(0, variation=1, samples=4),
        lambda: exact_longest(1, variation=1, samples=0),
        lambda: compare_longest(variation=1, samples=2, trials=1, seed=0),
    ],
)
def test_bad_numbers_are_refused(call: object) -> None:
    with pytest.raises(UserError):
        call()  # type: ignore[operator]
