"""Random groups of samples: how long each sample is, and whether the rewards differ."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import NormalDist
from typing import Protocol

from sixfold.errors import UserError

from ..stragglers import lognormal_lengths, lognormal_sigma


@dataclass(frozen=True)
class Drawn:
    """One group.

    Attributes:
        lengths: sampled tokens of each sample, at least 1.
        mixed: the rewards differ, so the group has a gradient.
    """

    lengths: tuple[int, ...]
    mixed: bool


class Groups(Protocol):
    """Source of random groups."""

    def draw(self, random: Random, samples: int) -> Drawn:
        """A group of `samples` samples."""
        ...


@dataclass(frozen=True)
class LogNormalGroups:
    """Log-normal lengths with a bound, and binary rewards with one pass rate.

    Attributes:
        mean: mean length after truncation at the bound, in tokens.
        variation: coefficient of variation before truncation.
        longest: bound of the length, in tokens.
        pass_rate: probability that a sample is correct.
    """

    mean: float
    variation: float
    longest: float
    pass_rate: float

    @cached_property
    def untruncated(self) -> float:
        """Mean of the lengths before truncation, found by bisection."""
        sigma = lognormal_sigma(self.variation)
        if sigma == 0:
            return self.mean
        low, high = self.mean, self.mean * math.exp(40)
        for _ in range(100):
            middle = math.sqrt(low * high)
            below = truncated_mean(middle, sigma, self.longest) < self.mean
            low, high = (middle, high) if below else (low, middle)
        return low

    def draw(self, random: Random, samples: int) -> Drawn:
        """A group of independent samples."""
        drawn = lognormal_lengths(random, samples, self.untruncated, self.variation)
        lengths = tuple(max(1, round(min(length, self.longest))) for length in drawn)
        correct = sum(random.random() < self.pass_rate for _ in range(samples))
        return Drawn(lengths, 0 < correct < samples)


def truncated_mean(mean: float, sigma: float, longest: float) -> float:
    """Mean of `min(X, longest)` for log-normal X.

    `mean * N(d - s) + longest * (1 - N(d))` with `d = (ln(longest / mean) + s^2 / 2) / s`.

    Args:
        sigma: standard deviation s of ln X. Above 0.
    """
    normal = NormalDist()
    reach = (math.log(longest / mean) + sigma**2 / 2) / sigma
    return mean * normal.cdf(reach - sigma) + longest * normal.cdf(-reach)


@dataclass(frozen=True)
class RecordedGroup:
    """A group of an earlier run.

    Attributes:
        lengths: sampled tokens of each sample.
        rewards: reward of each sample. None if its check failed.
    """

    lengths: tuple[int, ...]
    rewards: tuple[float | None, ...]


class RecordedGroups:
    """Groups of an earlier run, drawn at random with replacement.

    A group of fewer samples than recorded is a random subset, without replacement. Its share of
    groups with equal rewards is then unbiased.
    """

    def __init__(self, groups: Sequence[RecordedGroup]) -> None:
        self._groups = sorted(groups, key=lambda group: -len(group.lengths))

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def largest(self) -> int:
        return len(self._groups[0].lengths)

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of all samples, at least 1 each."""
        return [max(1, length) for group in self._groups for length in group.lengths]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def solved(self) -> float:
        """Share of samples with a positive reward, among those whose check did not fail."""
        known = [r for group in self._groups for r in group.rewards if r is not None]
        return sum(reward > 0 for reward in known) / len(known) if known else 0.0

    def draw(self, random: Random, samples: int) -> Drawn:
        """Draw a recorded group of at least `samples` samples, and a random subset of it.

        Raises:
            UserError: if no group is large enough.
        """
        enough = bisect_right(self._groups, -samples, key=lambda group: -len(group.lengths))
        if not enough:
            raise UserError(
                f"the recorded groups have at most {self.largest} samples, not {samples}: lower"
                " rollout.samples_per_prompt, or use a run with larger groups"
            )
        group = self._groups[random.randrange(enough)]
        chosen = random.sample(range(len(group.lengths)), samples)
        lengths = tuple(max(1, group.lengths[i]) for i in chosen)
        rewards = {group.rewards[i] for i in chosen} - {None}
        return Drawn(lengths, len(rewards) > 1)
