"""pass@k against enumeration, intervals and tests against published and hand-computed values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sixfold.evaluation.statistics import mean_interval, paired_test, pass_at_k, task_interval, task_means, wilson_interval


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 3, 5, 0.916667), (16, 1, 8, 0.5), (8, 0, 4, 0.0), (8, 6, 4, 1.0)],
)
def test_pass_at_k_golden(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-7)


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_stable_where_binomials_overflow_a_float() -> None:
    exact = 1 - math.comb(4990, 1000) / math.comb(5000, 1000)
    assert pass_at_k(5000, 10, 1000) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(n, c, k)


def test_wilson_by_hand() -> None:
    # 80 of 100, z = 1.96: center (0.8 + 0.019208) / 1.038416, half 1.96 sqrt(0.0016 + 0.00009604) / 1.038416
    interval = wilson_interval(80, 100)
    assert interval == pytest.approx((0.8, 0.7111690, 0.8666341), abs=1e-7)


def test_wilson_ends_solve_its_equation_and_stay_inside() -> None:
    for successes, n in [(0, 5), (5, 5), (1, 512), (461, 512)]:
        _, low, high = wilson_interval(successes, n)
        assert 0 <= low < high <= 1
        for end in (low, high):
            assert (successes / n - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / n, abs=1e-12)
    assert wilson_interval(0, 5).low == 0.0 and wilson_interval(5, 5).high == 1.0


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.30265), (6, 2.57058), (11, 2.22814), (31, 2.04227), (121, 1.97993)])
def test_mean_interval_uses_students_quantile(n: int, t: float) -> None:
    values = [float(i) for i in range(n)]
    mean, low, high = mean_interval(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    assert mean == (n - 1) / 2
    assert ((high - mean) / error, (mean - low) / error) == pytest.approx((t, t), rel=3e-6)


def test_one_value_has_an_infinite_interval_and_none_is_refused() -> None:
    assert mean_interval([0.5]) == (0.5, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_samples_of_a_task_count_once() -> None:
    once = [[1.0], [0.0], [0.0], [1.0], [1.0]]
    tenfold = [task * 10 for task in once]
    assert task_means(tenfold) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert task_interval(tenfold) == mean_interval([1.0, 0.0, 0.0, 1.0, 1.0])
    assert task_interval(once) == wilson_interval(3, 5)
    assert task_interval([[0.5], [0.25]]) == mean_interval([0.5, 0.25])


def test_mcnemar_is_the_sign_test_on_the_tasks_that_differ() -> None:
    # 9 tasks where a is right and b wrong, 1 the other way: p = 2 (C(10,0) + C(10,1)) / 2^10
    a = [1.0] * 9 + [0.0] + [1.0] * 20 + [0.0] * 10
    b = [0.0] * 9 + [1.0] + [1.0] * 20 + [0.0] * 10
    result = paired_test(a, b)
    assert (result.test, result.wins, result.losses, result.n) == ("McNemar, exact", 9, 1, 40)
    assert result.p_value == pytest.approx(22 / 1024)
    assert result.difference.mean == pytest.approx(0.2)
    assert paired_test(b, a).difference.mean == pytest.approx(-0.2) and paired_test(b, a).p_value == result.p_value


def test_equal_checkpoints_do_not_differ() -> None:
    assert paired_test([1.0, 0.0, 1.0], [1.0, 0.0, 1.0]).p_value == 1.0
    assert paired_test([0.5, 0.25], [0.5, 0.25]).p_value == 1.0
    assert paired_test([0.5], [0.1]).p_value == 1.0


def test_paired_t_by_hand() -> None:
    # differences 1, 2, 3, 4, 10: mean 4, sd 3.5355, error 1.58114, t = 2.52982 with 4 degrees of freedom: p = 0.0647 (tables: .1 > p > .05)
    result = paired_test([1.0, 2.0, 3.0, 4.0, 10.0], [0.0] * 5)
    t2 = 2.5298221**2
    # for 4 degrees of freedom P(|T| > t) has a closed form: 1 - s (1 + c / 2), s^2 = t^2 / (4 + t^2), c = 1 - s^2
    s = math.sqrt(t2 / (4 + t2))
    assert result.test == "paired t"
    assert result.p_value == pytest.approx(1 - s * (1 + (1 - s * s) / 2), abs=1e-8)
    assert result.difference == pytest.approx((4.0, 4 - 2.7764451 * 1.5811388, 4 + 2.7764451 * 1.5811388), abs=1e-6)


def test_p_values_are_uniform_when_nothing_differs() -> None:
    noise = random.Random(0)
    trials = [paired_test([noise.gauss(0, 1) for _ in range(8)], [noise.gauss(0, 1) for _ in range(8)]).p_value for _ in range(2000)]
    for level in (0.05, 0.25, 0.5, 0.75):
        share = sum(p <= level for p in trials) / len(trials)
        assert share == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / len(trials)))


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    noise = random.Random(1)
    held = 0
    for _ in range(2000):
        _, low, high = mean_interval([noise.gauss(3, 2) for _ in range(5)])
        held += low <= 3 <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_paired_test_needs_the_same_tasks() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        paired_test([1.0], [1.0, 0.0])
