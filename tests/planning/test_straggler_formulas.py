"""Longest sample of a rollout, straggler tax and length caps: published numbers."""

from __future__ import annotations

import math

import pytest

from sixfold_planning.stragglers import (
    compare_longest,
    exact_longest,
    expected_longest,
    lognormal_sigma,
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


def test_straggler_tax() -> None:
    """L22b: a longest of 4,015 with a mean of 994 is a tax of 304 %."""
    lengths = [4015.0] + [(994 * 16 - 4015) / 15] * 15
    assert straggler_tax(lengths) == pytest.approx(3.04, abs=0.005)
    assert straggler_tax([5, 5, 5]) == 0
