"""pass@k against enumeration, intervals and tests against published and hand-computed values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sixfold.evaluation.statistics import (
    EXACT_UP_TO,
    binomial_cdf,
    bounded_interval,
    mean_interval,
    paired_test,
    pass_at_k,
    task_interval,
    task_means,
    wilson_interval,
)


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
            assert pass_at_k(n, c, k) == pytest.approx(
                sum(any(draw) for draw in draws) / len(draws), abs=1e-12
            )


def test_pass_at_k_is_stable_where_binomials_overflow_a_float() -> None:
    exact = 1 - math.comb(4990, 1000) / math.comb(5000, 1000)
    assert pass_at_k(5000, 10, 1000) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(n, c, k)


def test_binomial_cdf_by_hand() -> None:
    """P(X <= 1), n = 4, p = 1/4: (81 + 108) / 256. Where (1 - p)^n underflows, the sum does not."""
    assert binomial_cdf(1, 4, 0.25) == pytest.approx(189 / 256)
    assert binomial_cdf(4, 4, 0.25) == pytest.approx(1)
    assert [binomial_cdf(s, 8, p) for s, p in ((0, 0), (7, 1), (8, 1))] == [1, 0, 1]
    assert binomial_cdf(10_000, 20_000, 0.5) == pytest.approx(0.5 + 0.5 * 0.005642, abs=1e-5)


def test_wilson_by_hand() -> None:
    # 80 of 100, z = 1.96: center (0.8 + 0.019208) / 1.038416, half 1.96 sqrt(0.0016 + 0.00009604) /
    # 1.038416
    interval = wilson_interval(80, 100)
    assert interval == pytest.approx((0.8, 0.7111690, 0.8666341), abs=1e-7)


def test_wilson_ends_solve_its_equation_and_stay_inside() -> None:
    for successes, n in [(0, 5), (5, 5), (1, 512), (461, 512)]:
        _, low, high = wilson_interval(successes, n)
        assert 0 <= low < high <= 1
        for end in (low, high):
            assert (successes / n - end) ** 2 == pytest.approx(
                1.96**2 * end * (1 - end) / n, abs=1e-12
            )
    assert wilson_interval(0, 5).low == 0.0 and wilson_interval(5, 5).high == 1.0


@pytest.mark.parametrize(
    ("n", "t"),
    [(2, 12.7062), (3, 4.30265), (6, 2.57058), (11, 2.22814), (31, 2.04227), (121, 1.97993)],
)
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
    assert task_interval(tenfold) == bounded_interval([1.0, 0.0, 0.0, 1.0, 1.0])
    assert task_interval(once) == wilson_interval(3, 5)
    assert task_interval([[0.5], [0.25]]) == bounded_interval([0.5, 0.25])


def test_the_bounded_interval_by_hand() -> None:
    """10 tasks, all 0: 1.9208 ones and 11.9208 zeros; share c = 0.138773, error sqrt(c (1 - c) /
    13.8416). t(13) = 2.160369.
    """
    share = 1.9208 / 13.8416
    half = 2.160369 * math.sqrt(share * (1 - share) / 13.8416)
    assert task_interval([[0.0] * 4] * 10) == pytest.approx((0.0, 0.0, share + half))
    assert task_interval([[1.0] * 4] * 10) == pytest.approx((1.0, 1 - share - half, 1.0))
    # values 0.5 and 1, with 1.9208 values each at 0 and at 1 added: squares about the centre, by
    # the formula
    center = (1.5 + 1.9208) / 5.8416
    squares = (0.5 - center) ** 2 + (1 - center) ** 2 + 1.9208 * (center**2 + (1 - center) ** 2)
    half = 2.570582 * math.sqrt(squares) / 5.8416  # t(5)
    assert bounded_interval([0.5, 1.0]) == pytest.approx((0.75, center - half, 1.0))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 3, 50, 700])
@pytest.mark.parametrize("samples", [1, 2, 8])
def test_equal_outcomes_have_an_interval_of_some_width_inside_the_bounds(
    value: float, tasks: int, samples: int
) -> None:
    mean, low, high = task_interval([[value] * samples] * tasks)
    assert mean == pytest.approx(value) and 0 <= low <= mean <= high <= 1
    assert high - low > 1 / (2 * tasks)
    more = task_interval([[value] * samples] * (4 * tasks))
    assert more.high - more.low < high - low, "more tasks, more certain"


def test_rewards_outside_0_to_1_widen_the_bounds() -> None:
    assert task_interval([[-1.0], [-1.0], [-1.0]]).low == -1.0
    mean, low, high = task_interval([[-1.0, 1.0], [1.0, 1.0], [3.0, 1.0]])
    assert mean == 1.0 and -1 <= low < 1 < high <= 3


def _tasks(noise: random.Random, kind: str, count: int) -> list[list[float]]:
    """Draws of a population of tasks whose mean is known: see MEANS."""
    if kind == "unlike tasks":  # a quarter is solved 9 times in 10, the others 1 time in 10
        return [
            [float(noise.random() < p) for _ in range(8)]
            for p in (0.9 if noise.random() < 0.25 else 0.1 for _ in range(count))
        ]
    if kind == "rarely solved":
        return [
            [float(noise.random() < p) for _ in range(4)]
            for p in (0.8 if noise.random() < 0.05 else 0.0 for _ in range(count))
        ]
    if kind == "graded":
        return [[noise.betavariate(8, 2)] for _ in range(count)]
    return [
        [1.0 if noise.random() < 0.05 else 0.01] for _ in range(count)
    ]  # hardly any spread until a rare one comes


MEANS = {"unlike tasks": 0.3, "rarely solved": 0.04, "graded": 0.8, "rare": 0.0595}


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("count", [3, 10, 60])
def test_the_interval_over_tasks_holds_the_truth_19_times_in_20(kind: str, count: int) -> None:
    noise, held = random.Random(f"{kind}/{count}"), 0
    for _ in range(600):
        _, low, high = task_interval(_tasks(noise, kind, count))
        held += low <= MEANS[kind] <= high
    assert held / 600 > 0.93


@pytest.mark.parametrize("pairs", [4, 25])
def test_the_interval_of_a_difference_holds_the_truth_19_times_in_20(pairs: int) -> None:
    """a is right on 0.6 of the tasks, b on 0.4, and they agree more often than by chance."""
    noise, held = random.Random(pairs), 0
    for _ in range(600):
        draws = [noise.random() for _ in range(pairs)]
        a, b = [float(u < 0.6) for u in draws], [float(u < 0.35 or u > 0.95) for u in draws]
        _, low, high = paired_test(a, b).difference
        held += low <= 0.2 <= high
    assert held / 600 > 0.93


def test_two_tasks_give_no_significant_difference() -> None:
    for a, b in (([1.0, 1.0], [0.0, 0.0]), ([0.75, 0.75], [0.25, 0.25]), ([0.5, 0.9], [0.1, 0.5])):
        result = paired_test(a, b)
        assert result.p_value == 0.5, "2 of the 4 choices of signs are as extreme"
        assert result.difference.low < 0 < result.difference.mean <= result.difference.high <= 1


def test_the_permutation_test_counts_every_choice_of_signs() -> None:
    a, b = [0.5, 0.25, 1.0, 0.75, 0.5], [0.0, 0.5, 0.25, 0.5, 0.5]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    choices = list(itertools.product((1, -1), repeat=5))
    extreme = sum(
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        >= abs(sum(differences)) - 1e-12
        for signs in choices
    )
    result = paired_test(a, b)
    assert result.test == "sign-flip permutation, exact" and result.p_value == extreme / 32
    assert paired_test(b, a).p_value == result.p_value


@pytest.mark.parametrize("tasks", [EXACT_UP_TO, EXACT_UP_TO + 1, 40, 2000])
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.75, 0.25)])
def test_no_p_value_is_zero(tasks: int, a: float, b: float) -> None:
    p = paired_test([a] * tasks, [b] * tasks).p_value
    assert max(2.0 ** (1 - tasks), 1e-12) * 0.999 <= p < 2e-4


def test_mcnemar_is_the_sign_test_on_the_tasks_that_differ() -> None:
    # 9 tasks where a is right and b wrong, 1 the other way: p = 2 (C(10,0) + C(10,1)) / 2^10
    a = [1.0] * 9 + [0.0] + [1.0] * 20 + [0.0] * 10
    b = [0.0] * 9 + [1.0] + [1.0] * 20 + [0.0] * 10
    result = paired_test(a, b)
    assert (result.test, result.wins, result.losses, result.n) == ("McNemar, exact", 9, 1, 40)
    assert result.p_value == pytest.approx(22 / 1024)
    assert result.difference.mean == pytest.approx(0.2)
    assert (
        paired_test(b, a).difference.mean == pytest.approx(-0.2)
        and paired_test(b, a).p_value == result.p_value
    )


def test_equal_checkpoints_do_not_differ() -> None:
    assert paired_test([1.0, 0.0, 1.0], [1.0, 0.0, 1.0]).p_value == 1.0
    assert paired_test([0.5, 0.25], [0.5, 0.25]).p_value == 1.0
    assert paired_test([0.5], [0.1]).p_value == 1.0


def test_paired_t_by_hand() -> None:
    # differences 1 ... 15 and -20: mean 6.25, squared deviations 1240 + 400 - 16 * 6.25^2 = 1015,
    # error sqrt(1015 / 15 / 16)
    result = paired_test([*map(float, range(1, 16)), 0.0], [0.0] * 15 + [20.0])
    t2 = 6.25**2 * 15 * 16 / 1015
    # for 15 degrees of freedom: 26.7.3 of Abramowitz and Stegun, term by term
    angle = math.atan(math.sqrt(t2 / 15))
    series, term = 0.0, math.cos(angle)
    for i in range(1, 8):
        series += term
        term *= math.cos(angle) ** 2 * 2 * i / (2 * i + 1)
    assert result.test == "paired t" and (result.wins, result.losses) == (15, 1)
    assert result.p_value == pytest.approx(
        1 - 2 / math.pi * (angle + math.sin(angle) * series), abs=1e-9
    )


@pytest.mark.slow
def test_p_values_are_uniform_when_nothing_differs() -> None:
    noise = random.Random(0)
    trials = [
        paired_test(
            [noise.gauss(0, 1) for _ in range(8)], [noise.gauss(0, 1) for _ in range(8)]
        ).p_value
        for _ in range(2000)
    ]
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
