"""The KL weight (lesson 3): published values, and the settings under which hacking can occur."""

from __future__ import annotations

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.kl_anchor import reward, reward_slope

LAB = find("kl-anchor")


@pytest.mark.parametrize(
    ("beta", "theta", "value", "kl"),
    [
        (0.0, 2.137, 0.532, 4.57),
        (0.005, 2.045, 0.521, 4.18),
        (0.05, 1.452, 0.434, 2.11),
        (0.2, 0.72, 0.267, 0.518),
        (1.0, 0.204, 0.089, 0.041),
    ],
)
def test_small_steps_never_hack(beta: float, theta: float, value: float, kl: float) -> None:
    outcome = LAB(beta=beta, eta=0.05, steps=200)
    assert outcome.number("theta") == pytest.approx(theta, abs=2e-3)
    assert outcome.number("reward") == pytest.approx(value, abs=1e-3)
    assert outcome.number("kl") == pytest.approx(kl, rel=5e-3, abs=6e-4)
    assert outcome.values["hacked"] is False


@pytest.mark.parametrize(
    ("beta", "theta", "hacked"),
    [
        (0.0, 10.0, True),
        (0.001, 10.0, True),
        (0.002, 4.73, True),  # over the flag, but short of the bonus at 5
        (0.005, 3.77, False),
        (0.05, 1.60, False),
        (0.5, 0.366, False),
        (1.0, 0.204, False),
    ],
)
def test_large_steps_hack_with_a_small_kl_weight(beta: float, theta: float, hacked: bool) -> None:
    outcome = LAB(beta=beta, eta=0.5, steps=400)
    assert outcome.number("theta") == pytest.approx(theta, abs=5e-3)
    assert outcome.values["hacked"] is hacked


def test_hacking_is_reached_within_200_steps() -> None:
    outcome = LAB(beta=0.0, eta=0.5, steps=200)
    assert outcome.number("theta") == pytest.approx(6.55, abs=5e-3)


@pytest.mark.parametrize("theta", [0.05, 1.0, 4.9, 5.1, 9.0])
def test_slope_is_the_derivative_of_the_reward(theta: float) -> None:
    slope = (reward(theta + 1e-6) - reward(theta - 1e-6)) / 2e-6
    assert reward_slope(theta) == pytest.approx(slope, abs=1e-6)
