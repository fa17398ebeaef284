"""K rollouts and the verifier (lessons 2 and 3)."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold_labs.catalogue import find

LAB = find("rollouts")
VERIFIER = find("verifier")


@pytest.mark.parametrize(("temperature", "digit"), [(0.5, 0.85), (1.0, 0.70), (1.5, 0.55)])
def test_expected_reward_needs_both_digits_right(temperature: float, digit: float) -> None:
    outcomes = [LAB(k=16, temperature=temperature, seed=seed) for seed in range(60)]
    mean = sum(outcome.number("mean_reward") for outcome in outcomes) / 60
    assert outcomes[0].number("expected_reward") == pytest.approx(digit**2)
    assert mean == pytest.approx(digit**2, abs=0.05)  # 960 samples: 3 standard errors


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (2, 0.5), (4, 1.0), (4, 1.5)])
def test_share_of_degenerate_groups_is_the_closed_form(k: int, temperature: float) -> None:
    p = (1 - 0.3 * temperature) ** 2
    share = sum(
        LAB(k=k, temperature=temperature, seed=seed).values["degenerate"] is True
        for seed in range(500)
    )
    expected = p**k + (1 - p) ** k
    assert share / 500 == pytest.approx(expected, abs=0.07)
    assert LAB(k=k, temperature=temperature).number("degenerate_probability") == pytest.approx(
        expected
    )


def test_rewards_are_those_of_the_shown_responses() -> None:
    outcome = LAB(k=16, seed=3)
    for _, response, reward in outcome.tables[0].rows:
        assert reward == float(response == "12#")
    rewards = [float(str(row[2])) for row in outcome.tables[0].rows]
    mean = sum(rewards) / 16
    assert outcome.number("mean_reward") == mean
    assert outcome.number("std_reward") == pytest.approx((mean * (1 - mean)) ** 0.5)


@pytest.mark.parametrize(
    ("response", "integer", "reward"),
    [
        ("12#", "12", 1),
        ("let me think... 12#", "12", 1),
        ("11#", "11", 0),
        ("120#", "120", 0),
        ("no number", None, 0),
        ("", None, 0),
        ("3 + 4 = 7, then 12", "12", 1),
        ("12 is not 13", "13", 0),
        ("012", "12", 1),
        ("1" * 6000, "1" * 6000, 0),  # longer than int() reads
        ("\u0661\u0662", None, 0),  # Arabic digits
    ],
)
def test_verifier_reads_the_last_integer(response: str, integer: str | None, reward: int) -> None:
    values = VERIFIER(response=response).values
    assert (values["extracted_integer"], values["reward"]) == (integer, reward)


def test_verifier_compares_with_the_given_answer() -> None:
    assert VERIFIER(response="it is 0", answer=0).values["reward"] == 1
    with pytest.raises(UserError, match="--answer"):
        VERIFIER(response="it is 0", answer=-1)
