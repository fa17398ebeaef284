"""Cost of long completions: a synchronous rollout lasts as long as its longest sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random  # importing it takes 4 ms, and only trials need it


def lognormal_sigma(variation: float) -> float:
    """Sigma of a log-normal distribution with this standard deviation divided by its mean."""
    return math.sqrt(math.log(1 + variation**2))


def lognormal_lengths(draw: Random, samples: int, mean: float, variation: float) -> list[float]:
    """Random log-normal lengths.

    Args:
        draw: source of the random numbers.
        samples: number of lengths.
        mean: mean length, in tokens or seconds.
    """
    sigma = lognormal_sigma(variation)
    mu = math.log(mean) - sigma**2 / 2
    return [draw.lognormvariate(mu, sigma) for _ in range(samples)]


def expected_longest(mean: float, *, variation: float, samples: int) -> float:
    """Length of the longest of several log-normal lengths, by the extreme-value bound.

    `mean * exp(s * sqrt(2 ln K) - s^2 / 2)`. It is above the expectation: 43 % for 64 samples at
    s = 0.8. `exact_longest` integrates instead.

    Args:
        mean: mean length, in tokens or seconds.
        samples: number of samples K.
    """
    sigma = lognormal_sigma(variation)
    return mean * math.exp(sigma * math.sqrt(2 * math.log(samples)) - sigma**2 / 2)


_REACH, _STEPS = 9.0, 3600
"""Range of the integral in standard deviations, and its number of intervals (even)."""


def exact_longest(mean: float, *, variation: float, samples: int) -> float:
    """Expected length of the longest of several log-normal lengths.

    `mean * integral of exp(s z - s^2 / 2) d(Phi(z)^K)`, by Simpson's rule. Arguments as for
    `expected_longest`.
    """
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
    """Compare the bound, the integral and the mean of at least 2 random trials."""
    import random

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


def straggler_tax(lengths: Sequence[float]) -> float:
    """Time that a rollout of these lengths loses to its longest sample: longest / mean - 1."""
    mean = sum(lengths) / len(lengths)
    return max(lengths) / mean - 1
