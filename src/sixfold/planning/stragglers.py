"""Cost of long completions: a synchronous rollout lasts as long as its longest sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from . import checks

if TYPE_CHECKING:
    from random import Random  # importing it takes 4 ms, and only trials need it


def lognormal_sigma(variation: float) -> float:
    """Sigma of a log-normal distribution with a given coefficient of variation.

    Args:
        variation: standard deviation divided by mean.

    Returns:
        `sqrt(ln(1 + variation^2))`.

    Raises:
        UserError: if `variation` is negative.
    """
    checks.not_negative(variation=variation)
    return math.sqrt(math.log(1 + variation**2))


def lognormal_lengths(draw: Random, samples: int, mean: float, variation: float) -> list[float]:
    """Random log-normal lengths.

    Args:
        draw: source of the random numbers.
        samples: number of lengths.
        mean: mean length, in tokens or seconds.
        variation: coefficient of variation.

    Raises:
        UserError: if `mean` is not above 0, or `variation` is negative.
    """
    checks.positive(mean=mean)
    sigma = lognormal_sigma(variation)
    mu = math.log(mean) - sigma**2 / 2
    return [draw.lognormvariate(mu, sigma) for _ in range(samples)]


def expected_longest(mean: float, *, variation: float, samples: int) -> float:
    """Length of the longest of several log-normal lengths, by the extreme-value bound.

    `mean * exp(s * sqrt(2 ln K) - s^2 / 2)`. It is above the expectation: 43 % for 64 samples at
    s = 0.8. `exact_longest` integrates instead.

    Args:
        mean: mean length, in tokens or seconds.
        variation: coefficient of variation of the lengths.
        samples: number of samples K.

    Raises:
        UserError: if a number is out of range.
    """
    checks.positive(mean=mean)
    checks.whole(samples=samples)
    sigma = lognormal_sigma(variation)
    return mean * math.exp(sigma * math.sqrt(2 * math.log(samples)) - sigma**2 / 2)


_REACH, _STEPS = 9.0, 3600
"""Range of the integral in standard deviations, and its number of intervals (even)."""


def exact_longest(mean: float, *, variation: float, samples: int) -> float:
    """Expected length of the longest of several log-normal lengths.

    `mean * integral of exp(s z - s^2 / 2) d(Phi(z)^K)`, by Simpson's rule.

    Args:
        mean: mean length, in tokens or seconds.
        variation: coefficient of variation of the lengths.
        samples: number of samples K.

    Raises:
        UserError: if a number is out of range.
    """
    checks.positive(mean=mean)
    checks.whole(samples=samples)
    return mean * _unit_longest(lognormal_sigma(variation), samples)


@lru_cache(maxsize=256)
def _unit_longest(sigma: float, samples: int) -> float:
    """`exact_longest` for a mean of 1. The page of a plan asks for few of them, many times."""
    # exp(s z) moves the peak of the integrand up by s.
    low, high = -_REACH, _REACH + sigma
    width = (high - low) / _STEPS

    def density(z: float) -> float:
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        normal = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return math.exp(sigma * z - sigma**2 / 2) * samples * below ** (samples - 1) * normal

    weights = (1 if i in (0, _STEPS) else 4 if i % 2 else 2 for i in range(_STEPS + 1))
    total = sum(weight * density(low + i * width) for i, weight in enumerate(weights))
    return total * width / 3


@dataclass(frozen=True)
class LongestReport:
    """The longest of several lengths by three methods, in units of the mean length.

    Attributes:
        bound: `expected_longest`.
        exact: `exact_longest`.
        sampled: mean over random trials.
        standard_error: standard error of `sampled`.
    """

    bound: float
    exact: float
    sampled: float
    standard_error: float

    @property
    def excess(self) -> float:
        """How much the bound is above the exact expectation, as a share of it."""
        return self.bound / self.exact - 1


@lru_cache(maxsize=256)
def compare_longest(*, variation: float, samples: int, trials: int, seed: int) -> LongestReport:
    """Compare the bound, the integral and random trials.

    Args:
        variation: coefficient of variation of the lengths.
        samples: number of samples.
        trials: number of random trials. At least 2.
        seed: seed of the trials.

    Raises:
        UserError: if a number is out of range.
    """
    import random

    checks.whole(samples=samples)
    checks.whole(2, trials=trials)
    generator = random.Random(seed)
    longest = [max(lognormal_lengths(generator, samples, 1, variation)) for _ in range(trials)]
    mean = sum(longest) / trials
    variance = sum((value - mean) ** 2 for value in longest) / (trials - 1)
    return LongestReport(
        bound=expected_longest(1, variation=variation, samples=samples),
        exact=exact_longest(1, variation=variation, samples=samples),
        sampled=mean,
        standard_error=math.sqrt(variance / trials),
    )


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile with linear interpolation between neighbours, as in NumPy's default.

    The value at index `floor(0.95 n)` would be the maximum for up to 20 values, so a cap there
    would change nothing.

    Args:
        values: at least one number, in any order.
        fraction: 0 (smallest) to 1 (largest).

    Raises:
        UserError: if there are no values, or `fraction` is not between 0 and 1.
    """
    checks.whole(**{"number of values": len(values)})
    checks.share(fraction=fraction)
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def straggler_tax(lengths: Sequence[float]) -> float:
    """Time lost to the longest sample: maximum divided by mean, minus 1.

    Args:
        lengths: lengths of the samples of a rollout, in tokens or seconds.

    Raises:
        UserError: if there are no lengths, or their mean is not above 0.
    """
    checks.whole(**{"number of lengths": len(lengths)})
    mean = sum(lengths) / len(lengths)
    checks.positive(**{"mean length": mean})
    return max(lengths) / mean - 1


@dataclass(frozen=True)
class LengthCap:
    """Effect of a length limit on a rollout.

    Attributes:
        limit: the limit, in the unit of the lengths.
        lengths: lengths after truncation.
        truncated: share of samples that are truncated.
        longest_saved: reduction of the longest length, as a share of it.
        tokens_saved: reduction of the sum of lengths, as a share of it.
        tax: straggler tax after truncation.
    """

    limit: float
    lengths: tuple[float, ...]
    truncated: float
    longest_saved: float
    tokens_saved: float
    tax: float


def cap_at_percentile(
    lengths: Sequence[float], *, fraction: float, pool: Sequence[float]
) -> LengthCap:
    """Truncate samples at a percentile of a pool of lengths.

    Args:
        lengths: lengths of the samples of a rollout.
        fraction: percentile of the pool, such as 0.95.
        pool: lengths that set the limit: those of recent successful samples. A pool that is larger
            than the rollout makes the limit stable.

    Raises:
        UserError: if a sequence is empty, or `fraction` is not between 0 and 1.
    """
    limit = percentile(pool, fraction)
    straggler_tax(lengths)  # refuses lengths without a mean
    capped = tuple(min(length, limit) for length in lengths)
    return LengthCap(
        limit=limit,
        lengths=capped,
        truncated=sum(length > limit for length in lengths) / len(lengths),
        longest_saved=1 - max(capped) / max(lengths),
        tokens_saved=1 - sum(capped) / sum(lengths),
        tax=straggler_tax(capped),
    )
