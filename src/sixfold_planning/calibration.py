"""Costs of a machine from timed steps of small models: repeat, take medians, fit.

`sixfold_planning/measure.py` runs the steps. Everything here is arithmetic on their seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .measured_rates import CostTable


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated measurements of one thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, divided by the median. 0 for one repetition."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def repeated(
    cases: Mapping[str, Callable[[], int]],
    clock: Callable[[], float],
    *,
    budget_s: float,
    least: int,
    most: int,
) -> dict[str, Timing]:
    """Time every case in turn, round after round.

    Slow seconds of the machine then fall on all cases alike. The first round is a warm-up and does
    not count.

    Args:
        cases: name -> function that does the work and waits until it is done. It returns how many
            equal units of work it did; seconds are per unit.
        clock: returns seconds.
        budget_s: no round starts after this many seconds, once `least` rounds are done.
        least: rounds in any case, warm-up excluded.
        most: rounds at most.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    started = clock()
    for number in range(most + 1):
        if number > least and clock() - started > budget_s:
            break
        for name, work in cases.items():
            before = clock()
            units = work()
            if number:
                seconds[name].append((clock() - before) / units)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def fitted_costs(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Costs c >= 0 with the smallest sum of ((counts c - seconds) / seconds)^2.

    Every subset of costs is solved by least squares, and the best one without negative costs is
    taken: that is the minimum of the constrained problem, because it solves the unconstrained one
    on the costs that are not 0.

    Args:
        counts: for each measurement, what each cost is multiplied with. At most a few costs.
        seconds: of each measurement, above 0.
    """
    rows = [[c / s for c in row] for row, s in zip(counts, seconds, strict=True)]
    width = len(rows[0])
    best, least = [0.0] * width, float(len(rows))
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            solution = _least_squares([[row[i] for i in chosen] for row in rows])
            if solution is None or min(solution) < 0:
                continue
            costs = [0.0] * width
            for index, cost in zip(chosen, solution, strict=True):
                costs[index] = cost
            error = sum(
                (sum(c * n for c, n in zip(costs, row, strict=True)) - 1) ** 2 for row in rows
            )
            if error < least:
                best, least = costs, error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x with the smallest |rows x - 1|^2. None if it is not unique.

    Columns are scaled to length 1, and the normal equations are solved by Gaussian elimination with
    pivoting.
    """
    width = len(rows[0])
    scales = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(width)]
    if not all(scales):
        return None
    unit = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    table = [
        [sum(row[i] * row[j] for row in unit) for j in range(width)] + [sum(r[i] for r in unit)]
        for i in range(width)
    ]
    for at in range(width):
        pivot = max(range(at, width), key=lambda i: abs(table[i][at]))
        if abs(table[pivot][at]) < 1e-10:
            return None
        table[at], table[pivot] = table[pivot], table[at]
        for i in range(width):
            if i != at:
                factor = table[i][at] / table[at][at]
                table[i] = [a - factor * b for a, b in zip(table[i], table[at], strict=True)]
    return [table[i][width] / table[i][i] / scales[i] for i in range(width)]


def fitted_table(measured: Mapping[int, Sequence[tuple[Sequence[float], float]]]) -> CostTable:
    """Costs of one kind of call, fitted for each number of tokens on its own.

    Args:
        measured: tokens -> (`call_counts`, seconds) of each model.
    """
    tokens = sorted(measured)
    found = [
        fitted_costs([counts for counts, _ in measured[n]], [s for _, s in measured[n]])
        for n in tokens
    ]
    call, layer, flop, number = zip(*found, strict=True)
    return CostTable(tuple(tokens), call, layer, flop, number)
