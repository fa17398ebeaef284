"""The bandit against the policy gradient in closed form, and against its known means."""

from __future__ import annotations

import math

import pytest

from sixfold.pages.lab import Outcome
from sixfold_labs.bandit import REWARDS
from sixfold_labs.catalogue import find
from sixfold_labs.softmax_policy import score, softmax

LOGITS = [0.3, -0.2, 0.8, 0.0, -1.1]


def expected_reward(logits: list[float]) -> float:
    weights = [math.exp(x) for x in logits]
    return sum(w * r for w, r in zip(weights, REWARDS, strict=True)) / sum(weights)


def test_mean_update_is_the_gradient_of_the_expected_reward() -> None:
    policy = softmax(LOGITS)
    mean = [
        sum(
            p * r * score(policy, arm)[i]
            for arm, (p, r) in enumerate(zip(policy, REWARDS, strict=True))
        )
        for i in range(5)
    ]
    for i in range(5):
        up, down = list(LOGITS), list(LOGITS)
        up[i] += 1e-5
        down[i] -= 1e-5
        slope = (expected_reward(up) - expected_reward(down)) / 2e-5
        assert mean[i] == pytest.approx(slope, abs=1e-9)


def best(outcome: Outcome) -> float:
    """Probability of the best arm."""
    policy = outcome.values["policy"]
    assert isinstance(policy, list)
    return float(policy[2])


@pytest.mark.parametrize(("eta", "mean"), [(0.05, 0.90), (0.1, 0.96), (0.4, 0.99), (1.0, 0.99)])
def test_probability_of_the_best_arm_after_500_steps(eta: float, mean: float) -> None:
    lab = find("bandit")
    outcomes = [lab(eta=eta, steps=500, seed=seed) for seed in range(25)]
    assert sum(map(best, outcomes)) / 25 == pytest.approx(mean, abs=0.025)


@pytest.mark.nightly
@pytest.mark.slow
def test_share_of_runs_locked_on_a_wrong_arm() -> None:
    lab = find("bandit")

    def runs(eta: float) -> list[Outcome]:
        return [lab(eta=eta, steps=500, seed=seed) for seed in range(100)]

    def locked(outcomes: list[Outcome]) -> float:
        return sum(o.values["locked_on_wrong_arm"] is True for o in outcomes) / len(outcomes)

    largest = runs(2.0)
    assert locked(largest) == pytest.approx(0.06, abs=0.04)
    assert sum(best(o) for o in largest) / 100 == pytest.approx(0.94, abs=0.05)
    assert locked(runs(1.0)) == pytest.approx(0.01, abs=0.02)
    assert locked(runs(0.4)) == 0
