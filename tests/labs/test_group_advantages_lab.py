"""Advantages of one group (lessons 4, 11 and 12)."""

from __future__ import annotations

import pytest

from sixfold.pages.lab import Outcome
from sixfold_labs.catalogue import find

ADVANTAGES, GRPO, PAIR = find("advantages"), find("grpo-group"), find("grpo-rloo")


def columns(outcome: Outcome) -> dict[object, list[float]]:
    return {row[0]: [float(str(cell)) for cell in row[1:]] for row in outcome.tables[0].rows}


def test_five_algorithms_on_one_right_answer_of_three() -> None:
    found = columns(ADVANTAGES(r0=0.0, r1=0.0, r2=1.0))
    assert found["REINFORCE"] == [0, 0, 1]
    assert found["REINFORCE, baseline"] == pytest.approx([-0.33, -0.33, 0.67], abs=5e-3)
    assert found["GRPO"] == pytest.approx([-0.71, -0.71, 1.41], abs=5e-3)
    assert found["RLOO"] == pytest.approx([-0.5, -0.5, 1.0], abs=5e-3)
    assert found["Dr. GRPO"] == pytest.approx([-0.33, -0.33, 0.67], abs=5e-3)


@pytest.mark.parametrize("reward", [0.0, 0.37, 1.0])
def test_equal_rewards_leave_only_plain_reinforce(reward: float) -> None:
    outcome = ADVANTAGES(r0=reward, r1=reward, r2=reward)
    found = columns(outcome)
    assert outcome.values["degenerate"] is True
    assert found.pop("REINFORCE") == [reward] * 3
    for row in found.values():
        assert row == pytest.approx([0.0] * 3, abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1, 0, 1, 0), (1, -1, 1, -1)),
        ((1, 1, 1, 0), (0.577, 0.577, 0.577, -1.732)),
        ((1, 1, 0, 0), (1, 1, -1, -1)),  # the n - 1 form of the std would give 0.866
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((1, 1, 1, 1), (0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("source", ["formula", "library"])
def test_grpo_of_four_rewards(
    rewards: tuple[int, ...], expected: tuple[float, ...], source: str
) -> None:
    outcome = GRPO(**{f"r{i}": reward for i, reward in enumerate(rewards)}, source=source)
    assert outcome.values["advantages"] == pytest.approx(expected, abs=5e-4)
    assert outcome.values["degenerate"] is (len(set(rewards)) == 1)
    effects = [row[4] for row in outcome.tables[0].rows]
    signs = {1: "more likely", 0: "none", -1: "less likely"}
    assert effects == [signs[(a > 0) - (a < 0)] for a in expected]


@pytest.mark.parametrize(("k", "ratio"), [(2, 2.0), (4, 1.333), (8, 1.143), (10, 1.111)])
@pytest.mark.parametrize("source", ["formula", "library"])
def test_rloo_is_the_centred_advantage_times_k_over_k_minus_1(
    k: int, ratio: float, source: str
) -> None:
    mixed = [
        o
        for seed in range(20)
        if not (o := PAIR(k=k, seed=seed, source=source)).values["degenerate"]
    ]
    assert len(mixed) >= 5
    for outcome in mixed:
        assert outcome.number("ratio") == pytest.approx(ratio, abs=5e-4)
        for _, reward, centred, others, _ in outcome.tables[0].rows:
            rest = outcome.number("mean") * k - float(str(reward))
            assert others == pytest.approx(float(str(reward)) - rest / (k - 1))
            assert others == pytest.approx(ratio * float(str(centred)), abs=1e-3)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_equal_rewards_have_no_ratio(accuracy: float) -> None:
    outcome = PAIR(accuracy=accuracy)
    assert outcome.values["ratio"] is None
    assert all(row[3] == 0 for row in outcome.tables[0].rows)


def test_library_and_formula_agree_on_uneven_rewards() -> None:
    given = {"r0": 0.13, "r1": 0.58, "r2": 0.91}
    library = columns(ADVANTAGES(**given, source="library"))
    for name, row in columns(ADVANTAGES(**given)).items():
        assert library[name] == pytest.approx(row, abs=1e-9)
