"""Labs of preferences against closed forms and the numbers of L15, L16 and G05."""

from __future__ import annotations

import itertools
import math

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.direct_preference import optimal_policy, train_policy
from sixfold_labs.preference_losses import dpo_loss, ipo_loss
from sixfold_labs.preferences import TRUE_SCORES, sigmoid
from sixfold_labs.reward_model import fit, score_error


@pytest.mark.parametrize(("gap", "probability"), [(0, 0.5), (1, 0.73), (3, 0.95), (-3, 0.05)])
def test_bradley_terry_probability_of_a_gap(gap: float, probability: float) -> None:
    assert sigmoid(gap) == pytest.approx(probability, abs=0.005)


def test_first_reward_model_update_is_half_of_the_learning_rate() -> None:
    scores, losses, _ = fit(eta=0.3, steps=1, seed=0)
    assert sorted(scores) == pytest.approx([-0.15, 0, 0, 0.15])
    assert losses == pytest.approx([math.log(2)])


def test_reward_model_updates_keep_the_sum_of_scores() -> None:
    scores, _, _ = fit(eta=0.9, steps=300, seed=1)
    assert sum(scores) == pytest.approx(0, abs=1e-9)
    assert score_error(scores) == pytest.approx(score_error([s + 7 for s in scores]))


def test_agreement_stays_at_that_of_the_true_scores() -> None:
    gaps = [b - a for a, b in itertools.combinations((0, 1, 2, 2.5), 2)]
    ceiling = sum(1 / (1 + math.exp(-gap)) for gap in gaps) / len(gaps)
    agreement = find("reward-model")(eta=0.02, steps=8000).number("agreement_with_labels")
    assert agreement == pytest.approx(ceiling, abs=0.02)


def test_reward_model_learns_the_true_gaps_with_a_small_step() -> None:
    gaps = [(s := fit(eta=0.02, steps=4000, seed=seed)[0])[3] - s[0] for seed in range(8)]
    assert sum(gaps) / len(gaps) == pytest.approx(2.5, abs=0.2)


def test_a_large_learning_rate_jitters() -> None:
    def error(eta: float) -> float:
        return sum(score_error(fit(eta, 1500, seed)[0]) for seed in range(10)) / 10

    assert error(1.0) > 2 * error(0.05)


@pytest.mark.parametrize("beta", [0.05, 0.5, 2.0])
def test_first_dpo_update_is_half_of_eta_times_beta(beta: float) -> None:
    logits, _ = train_policy(beta, eta=0.1, steps=1, seed=0)
    assert sorted(logits) == pytest.approx([-0.05 * beta, 0, 0, 0.05 * beta])


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_dpo_converges_to_the_tilted_reference(beta: float) -> None:
    weights = [math.exp(score / beta) for score in TRUE_SCORES]
    best = weights[3] / sum(weights)
    assert optimal_policy(beta)[3] == pytest.approx(best)
    runs = [train_policy(beta, 0.03 / beta**2, 4000, seed) for seed in range(6)]
    late = [sum(curve[-2000:]) / 2000 for _, curve in runs]
    gaps = [beta * (logits[3] - logits[0]) for logits, _ in runs]
    assert sum(late) / 6 == pytest.approx(best, abs=0.04)
    assert sum(gaps) / 6 == pytest.approx(2.5, abs=0.35)


def test_dpo_reports_absolute_log_probabilities() -> None:
    values = find("dpo-policy")(steps=2000).values
    found = values["log_probabilities"]
    assert isinstance(found, list)
    logs = [float(logp) for logp in found]
    assert sum(map(math.exp, logs)) == pytest.approx(1)
    assert values["implicit_reward_gap"] == pytest.approx(0.5 * (logs[3] - logs[0]))


@pytest.mark.parametrize(("beta", "minimum"), [(0.05, 10), (0.1, 5), (0.5, 1), (2.0, 0.25)])
def test_ipo_minimum_on_the_plotted_scale(beta: float, minimum: float) -> None:
    outcome = find("preference-losses")(beta=beta, scale="margin")
    assert outcome.number("ipo_minimum_margin") == pytest.approx(minimum)
    best = min((i / 100 for i in range(1200)), key=lambda h: ipo_loss(h, beta, "margin"))
    assert best == pytest.approx(minimum)


def test_published_ipo_compares_the_log_ratio() -> None:
    outcome = find("preference-losses")(beta=0.1, scale="log-ratio")
    assert outcome.number("ipo_minimum_log_ratio") == pytest.approx(1 / (2 * 0.1))
    assert ipo_loss(0.3, 0.1, "log-ratio") == pytest.approx((3 - 5) ** 2)


def test_dpo_loss_is_ln_2_at_zero_and_falls() -> None:
    assert dpo_loss(0) == pytest.approx(math.log(2))
    assert dpo_loss(3) == pytest.approx(-math.log(0.9526), abs=1e-4)
    assert dpo_loss(800) == 0


@pytest.mark.parametrize(
    ("beta", "eta", "steps"), [(0.1, 0.2, 100), (0.1, 0.2, 1000), (0.5, 0.02, 400)]
)
def test_dpo_margin_follows_its_differential_equation(beta: float, eta: float, steps: int) -> None:
    # dm/dt = 2 eta beta^2 sigmoid(-m) has the solution m + exp(m) - 1 = 2 eta beta^2 t.
    margin = find("dpo-margin")(beta=beta, eta=eta, steps=steps).number("margin")
    assert margin + math.exp(margin) - 1 == pytest.approx(2 * eta * beta**2 * steps, rel=0.01)


def test_dpo_margin_rewards_and_gradient_at_the_start() -> None:
    start = find("dpo-margin")(steps=0)
    assert start.values["margin"] == 0
    assert start.number("gradient_of_chosen") == pytest.approx(-0.1 / 2)
    assert start.values["preference_accuracy"] == 0
    one = find("dpo-margin")(steps=1)
    assert one.number("reward_chosen") == pytest.approx(0.1 * 0.2 * 0.1 / 2)
    assert one.number("reward_rejected") == -one.number("reward_chosen")
    assert one.values["preference_accuracy"] == 1


@pytest.mark.parametrize("name", ["reward-model", "dpo-policy", "dpo-margin", "preference-losses"])
def test_the_library_gives_the_numbers_of_the_formulas(name: str) -> None:
    steps = {} if name == "preference-losses" else {"steps": 60}
    for changes in ({}, {"beta": 0.25} if name != "reward-model" else {"eta": 0.7}):
        lab = find(name)
        formula = lab(source="formula", **steps, **changes)
        library = lab(source="library", **steps, **changes)
        for key, value in formula.values.items():
            assert library.values[key] == pytest.approx(value, rel=1e-9), key
        for ours, theirs in zip(formula.tables, library.tables, strict=True):
            for row, other in zip(ours.rows, theirs.rows, strict=True):
                numbers = [(x, y) for x, y in zip(row, other, strict=True) if x != y]
                assert all(y == pytest.approx(x, rel=1e-9) for x, y in numbers)
