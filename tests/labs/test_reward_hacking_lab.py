"""Reward hacking against L18's means."""

from __future__ import annotations

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.reward_hacking import train
from sixfold_labs.softmax_policy import softmax


@pytest.mark.parametrize(
    ("rho", "solve", "error"),
    [
        (0.0, 0.99, 0.01),
        (0.2, 0.94, 0.03),
        (0.25, 0.80, 0.08),
        (0.3, 0.58, 0.1),
        (0.35, 0.33, 0.1),
        (0.5, 0.05, 0.03),
        (1.0, 0.0, 0.01),
    ],
)
def test_mean_probability_of_solving(rho: float, solve: float, error: float) -> None:
    mean = sum(softmax(train(rho, 1000, seed)[0])[0] for seed in range(40)) / 40
    assert mean == pytest.approx(solve, abs=error)


def test_break_even_and_rewards_of_the_default() -> None:
    lab = find("reward-hacking")
    assert lab().number("break_even_rho") == pytest.approx(0.3)
    hacked = lab(rho=1.0, steps=3000)
    assert hacked.number("expected_held_out") == pytest.approx(0.4, abs=0.01)
    assert hacked.number("expected_train_reward") == pytest.approx(1.4, abs=0.01)
    assert lab(rho=0.0, steps=3000).number("expected_held_out") == pytest.approx(0.7, abs=0.01)
