"""Search with noisy rewards against L17's table and exact probabilities."""

from __future__ import annotations

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.process_reward import sampled_steps
from sixfold_labs.process_steps import continuations

TABLE = [
    # p_good, N, beam, percent correct: one sample, best of N by outcome, by steps, beam
    (0.75, 16, 4, 18, 66, 62, 38),
    (0.75, 64, 4, 18, 66, 72, 70),
    (0.75, 64, 1, 18, 66, 71, 72),
    (0.95, 16, 4, 74, 96, 94, 90),
    (0.5, 16, 4, 1.5, 10, 13, 4.6),
]
NAMES = (
    "accuracy_one_sample",
    "accuracy_best_of_n_outcome",
    "accuracy_best_of_n_process",
    "accuracy_beam",
)


@pytest.mark.parametrize("row", TABLE)
def test_accuracies_of_the_four_methods(row: tuple[float, ...]) -> None:
    p_good, n, beam, *percent = row
    outcome = find("process-reward")(p_good=p_good, n=int(n), beam=int(beam), trials=800)
    measured = [100 * outcome.number(name) for name in NAMES]
    assert measured == pytest.approx(percent, abs=5)


@pytest.mark.parametrize(("p_good", "n"), [(0.75, 16), (0.75, 2), (0.5, 16), (0.95, 4)])
def test_best_of_n_with_a_noisy_outcome_reward_in_closed_form(p_good: float, n: int) -> None:
    solved = p_good**6
    right, wrong = 0.9 * solved, 0.1 * (1 - solved)
    flagged = right + wrong
    none = (1 - flagged) ** n
    exact = (1 - none) * right / flagged + none * 0.1 * solved / (1 - flagged)
    outcome = find("process-reward")(p_good=p_good, n=n, trials=2000)
    assert outcome.number("accuracy_best_of_n_outcome") == pytest.approx(exact, abs=0.035)


def test_one_sample_is_right_if_all_six_steps_are() -> None:
    exact = find("process-reward")().number("exact_accuracy_one_sample")
    assert exact == pytest.approx(0.178, abs=5e-4)


@pytest.mark.parametrize(("n", "beam", "width"), [(16, 4, 1), (64, 4, 3), (64, 1, 11), (48, 2, 4)])
def test_budget_of_the_beam(n: int, beam: int, width: int) -> None:
    assert continuations(n, beam) == width
    assert sampled_steps(n, beam) == [6, 6 * n, 6 * n, 6 * beam * width]


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize(("n", "beam"), [(16, 4), (48, 2)])
def test_the_search_of_the_library_agrees(n: int, beam: int) -> None:
    """Its chains are other draws of the same distribution: five standard errors are allowed."""
    formula = find("process-reward")(n=n, beam=beam, trials=2000)
    library = find("process-reward")(n=n, beam=beam, trials=100, source="library")
    for name in NAMES:
        exact = formula.number(name)
        allowed = 5 * (exact * (1 - exact) * (1 / 100 + 1 / 2000)) ** 0.5
        assert library.number(name) == pytest.approx(exact, abs=allowed)
    assert library.tables[0].rows != formula.tables[0].rows
    assert [row[2] for row in library.tables[0].rows] == sampled_steps(n, beam)
