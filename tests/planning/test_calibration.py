"""Repeating with a made-up timer, medians and spread, and the fit of costs."""

from __future__ import annotations

import itertools

import pytest

from sixfold_planning.calibration import Timing, fitted_costs, fitted_table, repeated


class Clock:
    """A clock that moves only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_median_and_half_the_interquartile_range() -> None:
    """Quartiles of 1, 2, 3, 4, 5 by linear interpolation are 2 and 4."""
    timing = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert timing.median == 3
    assert timing.spread == pytest.approx(1 / 3)
    assert Timing((2.0,)).spread == 0


def test_seconds_are_per_unit_and_the_first_round_does_not_count() -> None:
    clock, order = Clock(), list[str]()
    slow = itertools.chain([100.0], itertools.repeat(3.0))

    def one() -> int:
        clock.now += next(slow)
        order.append("one")
        return 3

    def two() -> int:
        clock.now += 4
        order.append("two")
        return 1

    found = repeated({"one": one, "two": two}, clock, budget_s=1e9, least=1, most=2)
    assert found == {"one": Timing((1.0, 1.0)), "two": Timing((4.0, 4.0))}
    assert order == ["one", "two"] * 3


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 2), (39.0, 3), (40.0, 4), (1e9, 7)])
def test_the_budget_ends_the_rounds(budget: float, rounds: int) -> None:
    """Rounds of 10 s. One to warm up, at least 2 and at most 7 that count."""
    clock = Clock()

    def work() -> int:
        clock.now += 10
        return 1

    found = repeated({"work": work}, clock, budget_s=budget, least=2, most=7)
    assert len(found["work"].seconds) == rounds


def test_costs_are_recovered() -> None:
    counts = [(1, 2, 1e9), (1, 4, 1e9), (1, 2, 5e9), (1, 6, 9e9)]
    costs = (2e-4, 1e-3, 3e-11)
    seconds = [sum(c * n for c, n in zip(costs, row, strict=True)) for row in counts]
    assert fitted_costs(counts, seconds) == pytest.approx(costs)


def test_no_cost_is_negative_and_the_errors_are_relative() -> None:
    """The line through (1, 1) and (2, 3) has intercept -1. With intercept 0, the slope b that
    minimises (b - 1)^2 + (2 b / 3 - 1)^2 is (1 + 2 / 3) / (1 + 4 / 9) = 15 / 13."""
    assert fitted_costs([(1, 1), (1, 2)], [1, 3]) == pytest.approx([0, 15 / 13])


def test_the_fit_is_optimal() -> None:
    """Karush-Kuhn-Tucker: the gradient is 0 at positive costs, and not negative at 0."""
    counts = [(1.0, 3.0, 2.0), (1.0, 1.0, 7.0), (1.0, 4.0, 1.0), (1.0, 1.5, 5.0), (1.0, 9.0, 2.0)]
    seconds = [3.0, 1.0, 5.0, 1.5, 7.0]
    found = fitted_costs(counts, seconds)
    rows = [[c / s for c in row] for row, s in zip(counts, seconds, strict=True)]
    errors = [sum(c * n for c, n in zip(found, row, strict=True)) - 1 for row in rows]
    for index, cost in enumerate(found):
        gradient = sum(error * row[index] for error, row in zip(errors, rows, strict=True))
        assert gradient == pytest.approx(0, abs=1e-9) if cost > 0 else gradient > 0
    assert 0 < sum(cost > 0 for cost in found) < 3


def test_costs_that_cannot_be_told_apart_are_not_both_fitted() -> None:
    found = fitted_costs([(1, 2), (2, 4)], [10, 20])
    assert found[0] + 2 * found[1] == pytest.approx(10)


def test_a_table_has_costs_for_each_number_of_tokens() -> None:
    counts = [(1.0, 2.0, 10.0, 5.0), (1.0, 4.0, 10.0, 5.0), (1.0, 2.0, 40.0, 5.0)]
    counts += [(1.0, 2.0, 10.0, 50.0)]

    def seconds(costs: tuple[float, ...]) -> list[tuple[tuple[float, ...], float]]:
        return [(row, sum(c * n for c, n in zip(costs, row, strict=True))) for row in counts]

    table = fitted_table({64: seconds((1, 2, 3, 4)), 8: seconds((5, 6, 7, 8))})
    assert table.tokens == (8, 64)
    costs = (table.call_s, table.layer_s, table.flop_s, table.number_s)
    for index, pair in enumerate(costs):
        assert pair == pytest.approx((5 + index, 1 + index))
