"""Learning signal of groups with binary rewards: published numbers and exact enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sixfold.environment.pass_rate import (
    advantage_power,
    degenerate_probability,
    estimated_advantage_power,
    pool_signal,
    resampling_factor,
)


def test_degenerate_share() -> None:
    """L13: 0.9^4 + 0.1^4 = 0.656."""
    assert degenerate_probability(0.9, 4) == pytest.approx(0.6562)
    assert degenerate_probability(0.5, 1) == 1
    assert resampling_factor([0.9], 4) == pytest.approx(1 / 0.3438)
    assert resampling_factor([1], 4) == math.inf


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("samples", [2, 3, 6])
def test_formulas_equal_the_sum_over_all_outcomes(p: float, samples: int) -> None:
    equal = power = 0.0
    for rewards in itertools.product((0, 1), repeat=samples):
        probability = math.prod(p if r else 1 - p for r in rewards)
        equal += probability * (len(set(rewards)) == 1)
        power += probability * estimated_advantage_power([rewards])
    assert degenerate_probability(p, samples) == pytest.approx(equal)
    assert advantage_power(p) == pytest.approx(power)


def test_no_probability_and_no_samples_are_refused() -> None:
    for wrong in [(1.1, 4), (-0.1, 4), (0.5, 0)]:
        with pytest.raises(ValueError, match="degenerate_probability"):
            degenerate_probability(*wrong)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.95])
def test_estimate_converges_to_p_times_1_minus_p(p: float) -> None:
    """L18a: E[A^2] = p (1 - p)."""
    generator = random.Random(7)
    groups = [[float(generator.random() < p) for _ in range(8)] for _ in range(4000)]
    assert estimated_advantage_power(groups) == pytest.approx(p * (1 - p), abs=0.008)


def test_power_is_largest_at_one_half() -> None:
    assert advantage_power(0.5) == 0.25
    assert advantage_power(0) == advantage_power(1) == 0


def _pool(strength: float, curation: float) -> list[float]:
    """L18a's pool: 1,000 prompts, difficulty 3u^2 - 2u^3, pass rate sigmoid(6 (s - d))."""
    rates = []
    for i in range(1000):
        u = (i + 0.5) / 1000
        p = 1 / (1 + math.exp(-6 * (strength / 100 - (3 * u**2 - 2 * u**3))))
        if abs(p - 0.5) < 0.5 - 0.45 * curation / 100:
            rates.append(p)
    return rates


@pytest.mark.parametrize(
    ("strength", "curation", "samples", "kept", "signal", "wasted", "per_flop"),
    [
        (20, 0, 8, 1000, 120.5, 42, 1.51),
        (50, 0, 8, 1000, 122.9, 36, 1.54),
        (80, 0, 8, 1000, 120.5, 42, 1.51),
        (80, 80, 8, 160, 38.9, 1, 3.04),
        (80, 0, 4, 1000, 120.5, 56, None),
        (20, 0, 2, 1000, 120.5, 76, None),
        (20, 0, 32, 1000, 120.5, 22, None),
    ],
)
def test_pool_oracle(
    strength: float,
    curation: float,
    samples: int,
    kept: int,
    signal: float,
    wasted: float,
    per_flop: float | None,
) -> None:
    """L18a, oracle of the signal-density widget."""
    found = pool_signal(_pool(strength, curation), samples)
    assert found.prompts == kept
    assert found.signal == pytest.approx(signal, abs=0.05)
    assert 100 * found.wasted == pytest.approx(wasted, abs=0.5)
    if per_flop is not None:
        assert 100 * found.per_sample == pytest.approx(per_flop, abs=0.005)
