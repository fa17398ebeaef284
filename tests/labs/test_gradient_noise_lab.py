"""Noise of REINFORCE (lesson 9): the exact expectation and the 1 / sqrt(K) law."""

from __future__ import annotations

import math

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.gradient_noise import TRUE, deviation, expected_gradient

LAB = find("gradient-noise")


def closed_form() -> tuple[float, float]:
    """E[r u]: the probability is 1/2 + |g| cos t, cut to [0, 1], and only the odd part counts."""
    size = math.hypot(*TRUE)
    edge = math.acos(0.5 / size)
    flat = 0.5 * math.sin(edge)
    slope = size * ((math.pi / 2 - edge) / 2 - math.sin(2 * edge) / 4)
    length = 2 / math.pi * (flat + slope)
    return length * TRUE[0] / size, length * TRUE[1] / size


def test_expected_gradient_is_the_integral() -> None:
    assert expected_gradient() == pytest.approx(closed_form(), abs=1e-6)
    assert expected_gradient() == pytest.approx((0.287, 0.115), abs=3e-3)
    assert math.dist(expected_gradient(), TRUE) == pytest.approx(0.775, abs=6e-3)


@pytest.mark.parametrize(("k", "rms"), [(1, 0.639), (4, 0.321), (16, 0.159), (32, 0.113)])
def test_error_follows_one_over_sqrt_k(k: int, rms: float) -> None:
    outcome = LAB(k=k, estimates=1000 if k < 16 else 400, seed=1)
    assert outcome.number("rms_error") == pytest.approx(rms, rel=0.08)
    assert outcome.number("expected_error") == pytest.approx(rms, rel=0.01)
    assert outcome.number("expected_error") * math.sqrt(k) == pytest.approx(deviation())


def test_distance_from_the_reward_direction_has_a_floor() -> None:
    for k in (8, 32):
        assert LAB(k=k).number("rms_distance_from_reward_direction") > 0.75


def test_library_gradient_is_the_mean_of_products() -> None:
    given = {"k": 5, "estimates": 20, "seed": 4}
    formula, library = LAB(**given), LAB(**given, source="library")
    assert library.values["last_estimate"] == pytest.approx(formula.values["last_estimate"])
    assert library.number("rms_error") == pytest.approx(formula.number("rms_error"))
