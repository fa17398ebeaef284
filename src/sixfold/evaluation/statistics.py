"""Statistics of evaluations: pass@k, 95 % intervals, and tests of one checkpoint against another.

Standard library only. Intervals and tests are over tasks: samples of one task are correlated, so
they are first averaged to one value per task (`task_means`).

No interval has width 0 and no p-value is 0: agreement of a few tasks is weak evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Z = 1.96
"""Half-width of a normal 95 % interval, in standard deviations."""

EXACT_UP_TO = 14
"""Maximum number of differing tasks for which the permutation test enumerates all choices of signs
(at most 16,384)."""

LEAST_P = 1e-12
"""Smallest p-value reported. Below it, rounding and the tests' assumptions dominate."""


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two checkpoints, a and b, on the same tasks.

    Attributes:
        difference: mean of a - b per task, with its 95 % interval. Positive if a is better.
        p_value: two-sided p-value of no difference. Never 0.
        test: name of the test used.
        wins: tasks on which a is better.
        losses: tasks on which a is worse.
        n: number of tasks.
    """

    difference: Interval
    p_value: float
    test: str
    wins: int
    losses: int
    n: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is right: 1 - C(n-c, k) / C(n, k).

    arXiv:2107.03374, eq. 1, computed as a product of ratios so that nothing overflows.

    Args:
        n: samples taken.
        c: right samples among them.
        k: samples per draw.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def task_means(samples: Sequence[Sequence[float]]) -> list[float]:
    """One value per task: the mean over its samples.

    Raises:
        ValueError: if a task has no samples.
    """
    if not all(samples):
        raise ValueError("task_means: a task has no samples")
    return [math.fsum(task) / len(task) for task in samples]


def wilson_interval(successes: int, n: int) -> Interval:
    """Wilson's 95 % interval of a share.

    It stays inside [0, 1] and has nonzero width at 0 and at n.

    Wilson 1927, doi:10.1080/01621459.1927.10502953.

    Args:
        successes: number of outcomes that are 1.
        n: number of independent 0/1 outcomes.

    Raises:
        ValueError: unless 0 <= successes <= n and n >= 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson_interval: 0 <= successes <= n and n >= 1, got {successes} of {n}")
    share, z = successes / n, 1.96
    spread = 1 + z * z / n
    center = (share + z * z / (2 * n)) / spread
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / spread
    # At 0 and n the exact bounds are 0 and 1; rounding would leave 1e-17 on the wrong side.
    return Interval(
        share, 0.0 if successes == 0 else center - half, 1.0 if successes == n else center + half
    )


def binomial_cdf(successes: int, n: int, rate: float) -> float:
    """Probability of at most so many successes in n independent trials.

    It is the p-value of the exact test of a success rate of at least `rate`.

    Args:
        successes: the most, from 0 to n.
        n: number of trials.
        rate: probability of a success.
    """
    if rate in (0, 1):
        return float(rate == 0 or successes == n)
    odds, none = math.log(rate) - math.log1p(-rate), n * math.log1p(-rate)
    orders = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        for i in range(successes + 1)
    ]
    return math.fsum(math.exp(ways + i * odds + none) for i, ways in enumerate(orders))


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with Student's 95 % interval.

    The spread of a single value is unknown: its interval is infinite.

    Raises:
        ValueError: if there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("mean_interval: no values")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _t_quantile(0.95, n - 1) * _standard_error(values, mean)
    return Interval(mean, mean - half, mean + half)


def bounded_interval(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Interval:
    """Mean of independent values in [`low`, `high`], with a 95 % interval inside those bounds.

    Agresti and Coull's interval (1998, doi:10.1080/00031305.1998.10480550) for values that need not
    be 0 or 1: z^2 / 2 values are added at each bound, and Student's interval of all values is
    clipped to the bounds. Therefore equal values still have an interval, of width ~ 1 / n.

    Args:
        values: one per task.
        low: smallest possible value.
        high: largest possible value.

    Raises:
        ValueError: if there are no values, or one is outside the bounds.
    """
    if not values or not low < high or min(values) < low or max(values) > high:
        raise ValueError(f"bounded_interval: at least one value, all from {low} to {high}")
    mean = _inside(math.fsum(values) / len(values), min(values), max(values))
    start, end = _wald(values, [(low, Z * Z / 2), (high, Z * Z / 2)])
    return Interval(mean, max(low, min(start, mean)), min(high, max(end, mean)))


def task_interval(samples: Sequence[Sequence[float]]) -> Interval:
    """95 % interval of the mean over tasks, from the values of each task's samples.

    Wilson's interval if each task has one sample with outcome 0 or 1, otherwise `bounded_interval`
    of the task means. Values are assumed to lie between 0 and 1, or within the observed range if it
    is wider.
    """
    means = task_means(samples)
    if all(len(task) == 1 for task in samples) and set(means) <= {0.0, 1.0}:
        return wilson_interval(int(sum(means)), len(means))
    return bounded_interval(means, *_range(means))


def paired_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Compare two checkpoints by their values on the same tasks, in the same order. Deterministic.

    - 0/1 outcomes: exact McNemar test, that is, the sign test on the tasks where they differ.
    - Otherwise, if at most 14 tasks differ: exact sign-flip permutation test.
    - Otherwise: paired t test, with p no smaller than the permutation test could give.

    The interval of the difference is Agresti and Min's (2005, doi:10.1002/sim.1781). It adds two
    pairs: half a pair where only a is right, half a pair where only b is right, and one pair where
    they agree.

    Raises:
        ValueError: if there are no values, or the lengths differ.
    """
    if len(a) != len(b) or not a:
        raise ValueError(
            f"paired_test: the same tasks for both, at least one, got {len(a)} and {len(b)}"
        )
    differences = [x - y for x, y in zip(a, b, strict=True)]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    low, high = _range([*a, *b])
    difference = _difference_interval(differences, high - low)
    if {*a, *b} <= {0.0, 1.0}:
        return PairedTest(
            difference, _sign_test(wins, losses), "McNemar, exact", wins, losses, len(a)
        )
    if wins + losses <= EXACT_UP_TO:
        return PairedTest(
            difference,
            _sign_flip_test(differences),
            "sign-flip permutation, exact",
            wins,
            losses,
            len(a),
        )
    return PairedTest(difference, _paired_t(differences), "paired t", wins, losses, len(a))


def _difference_interval(differences: Sequence[float], span: float) -> Interval:
    """Mean difference with its 95 % interval. `span` is the largest possible difference."""
    mean = math.fsum(differences) / len(differences)
    low, high = _wald(differences, [(-span, 0.5), (0.0, 1.0), (span, 0.5)])
    return Interval(mean, max(-span, min(low, mean)), min(span, max(high, mean)))


def _wald(values: Sequence[float], added: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Ends of Student's 95 % interval of `values` and `added` values, given as (value, weight)."""
    total = len(values) + math.fsum(weight for _, weight in added)
    center = (math.fsum(values) + math.fsum(value * weight for value, weight in added)) / total
    squares = math.fsum((v - center) ** 2 for v in values)
    squares += math.fsum(weight * (value - center) ** 2 for value, weight in added)
    half = _t_quantile(0.95, round(total) - 1) * math.sqrt(squares) / total
    return center - half, center + half


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Assumed bounds of the values: 0 to 1, or wider if some values are outside."""
    return min(0.0, *values), max(1.0, *values)


def _inside(value: float, low: float, high: float) -> float:
    # The mean of equal values may be off by rounding, and then lie outside [low, high].
    return min(max(value, low), high)


def _sign_test(wins: int, losses: int) -> float:
    """Two-sided binomial p-value of `wins` against `losses` at even odds."""
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1))
    return min(1.0, max(2 * tail / 2**n, LEAST_P))


def _sign_flip_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean difference among all choices of signs."""
    nonzero = [abs(d) for d in differences if d]
    sums = [0.0]
    for d in nonzero:
        sums = [s + d for s in sums] + [s - d for s in sums]
    observed = abs(math.fsum(differences))
    tolerance = 1e-9 * sum(nonzero)  # the same signs summed in another order must count as equal
    return sum(abs(s) >= observed - tolerance for s in sums) / len(sums)


def _paired_t(differences: Sequence[float]) -> float:
    """Two-sided p-value of the paired t test.

    It is at least the p-value of the most extreme choice of signs.
    """
    mean = math.fsum(differences) / len(differences)
    least = max(2.0 ** (1 - min(60, sum(map(bool, differences)))), LEAST_P)
    error = _standard_error(differences, mean)
    if error == 0.0:
        return least
    return max(least, 1.0 - _t_coverage(abs(mean) / error, len(differences) - 1))


def _standard_error(values: Sequence[float], mean: float) -> float:
    """Standard error of the mean: sample standard deviation (n - 1) over the root of n."""
    n = len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _t_coverage(t: float, df: int) -> float:
    """P(|T| <= t) of Student's T with whole df.

    Finite series 26.7.3 and 26.7.4 of Abramowitz and Stegun.
    """
    angle = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    odd = df % 2
    term, total = 1.0, 0.0
    for i in range(1 + odd, df, 2):
        total += term
        term *= cos2 * i / (i + 1)
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


def _t_quantile(coverage: float, df: int) -> float:
    """The t with P(|T| <= t) = coverage, by bisection.

    From 100,000 degrees of freedom on it returns 1.96, which is accurate to 5 digits.
    """
    if df >= 100_000:
        return 1.95996
    low, high = 0.0, 1.0
    while _t_coverage(high, df) < coverage:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_coverage(middle, df) < coverage else (low, middle)
    return high
