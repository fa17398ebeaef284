"""Figures of reward models, and the Ties score of RewardBench 2, on scores that were made up."""

from __future__ import annotations

import math

import pytest

from sixfold.errors import UserError
from sixfold.evaluation.reward_bench import ScoredComparison, comparison_figures, ties_figures
from sixfold.evaluation.statistics import wilson_interval


def row(
    name: str, right: list[float], wrong: list[float], subset: str = "Ties"
) -> ScoredComparison:
    grades = [1.0] * len(right) + [0.0] * len(wrong)
    return ScoredComparison(name, subset, (*right, *wrong), tuple(grades))


def test_the_ties_score_is_that_of_a_hand_computation() -> None:
    """Prompt, spread, gap of tied, gap of ref:

    0   1.0   2.0    0.5   right, preferred, not preferred with the smaller gap
    1   0.5   1.0    4.0   right, preferred both ways
    2   3.0  -1.0    2.0   wrong
    3   0.0   2.0    1.0   no spread: the margin has its limit, 1
    4   0.0  -1.0    1.0   no spread, and wrong: -1
    5   0.0   0.0    1.0   neither spread nor gap: 0
    6   no row ref:6: only its accuracy counts
    """
    found = ties_figures([
        row("tied:0", [3.0, 4.0], [1.0, -9.0]), row("ref:0", [2.5], [2.0, 1.0]),
        row("tied:1", [2.5, 2.0, 2.2], [1.0]), row("ref:1", [5.0], [1.0]),
        row("tied:2", [4.0, 1.0], [2.0]), row("ref:2", [3.0], [1.0]),
        row("tied:3", [3.0, 3.0], [1.0]), row("ref:3", [2.0], [1.0]),
        row("tied:4", [0.0, 0.0], [1.0]), row("ref:4", [2.0], [1.0]),
        row("tied:5", [1.0, 1.0], [1.0]), row("ref:5", [2.0], [1.0]),
        row("tied:6", [1.0, 1.5], [0.0]),
        row("ref:7", [1.0], [2.0]),
    ])  # fmt: skip
    assert found.tied_accuracy == pytest.approx(4 / 7)  # 0, 1, 3, 6
    assert found.ref_accuracy == pytest.approx(6 / 7)  # all but 7
    assert found.preferred == pytest.approx(3 / 6)  # 0, 1, 3
    assert found.preferred_hard == pytest.approx(2 / 6)  # 1, 3
    tanh = (math.tanh(-0.5) + math.tanh(1.0) + math.tanh(-4 / 3) + 1 - 1 + 0) / 6
    assert found.margin == pytest.approx(tanh)
    assert found.score == pytest.approx(
        0.3 * 4 / 7 + 0.3 * 6 / 7 + 0.2 * 3 / 6 + 0.2 * 2 / 6 + 0.01 * tanh
    )


def test_ties_of_a_perfect_model_and_of_another_scale() -> None:
    rows = [row("tied:4", [2.0, 1.9], [-8.0]), row("ref:4", [2.0], [-8.0])]
    assert ties_figures(rows).score == pytest.approx(1.01)
    moved = [row(r.id, [0.1 * s + 7 for s in r.scores[:-1]], [0.1 * -8 + 7]) for r in rows]
    assert ties_figures(moved).score == pytest.approx(1.01)


def test_accuracy_is_of_pairs_and_best_of_is_of_the_highest_score() -> None:
    one = row("a", [1.0], [0.0, 1.0, 2.0])
    assert one.accuracy == pytest.approx(1.5 / 3) and one.best_of == 0.0
    assert row("b", [2.0], [2.0, 2.0, 0.0]).best_of == pytest.approx(1 / 3)
    graded = ScoredComparison("c", "", (3.0, 1.0, 2.0), (2.0, 1.0, 0.0))
    assert graded.accuracy == pytest.approx(2 / 3) and graded.best_of == 1.0


def test_subsets_and_the_score_of_the_benchmark() -> None:
    rows = [row(f"{n}", [1.0], [0.0 if n else 2.0], "Math") for n in range(4)]
    rows += [row("f", [1.0], [0.0], "Focus")]
    plain = comparison_figures(rows)
    assert list(plain.subsets) == ["Focus", "Math"] and plain.score is None
    assert plain.subsets["Math"].accuracy == wilson_interval(3, 4)
    assert plain.every.best_of == wilson_interval(4, 5)
    rows += [row("tied:4", [2.0, 1.9], [-8.0]), row("ref:4", [2.0], [-8.0])]
    assert comparison_figures(rows).score == pytest.approx((1 + 3 / 4 + 1.01) / 3)


def test_rows_of_ties_without_their_ids_are_refused() -> None:
    with pytest.raises(UserError, match=r"ref:N or tied:N, not '17'.*data\.id_field"):
        ties_figures([row("17", [1.0], [0.0])])
    with pytest.raises(UserError, match=r"no prompt has .*data\.limit = 0"):
        ties_figures([row("tied:1", [1.0], [0.0]), row("ref:2", [1.0], [0.0])])
