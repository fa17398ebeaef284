"""Learning signal of groups with binary rewards, as a function of the pass rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def degenerate_probability(pass_rate: float, samples: int) -> float:
    """Probability that all K samples of a group have the same reward: `p^K + (1 - p)^K`.

    Args:
        pass_rate: probability p that a sample solves the task. Rewards are 0 or 1.
        samples: samples per group, K.

    Raises:
        ValueError: if `pass_rate` is outside [0, 1], or `samples` is less than 1.
    """
    if not 0 <= pass_rate <= 1 or samples < 1:
        raise ValueError(
            f"degenerate_probability: pass_rate = {pass_rate} must be in [0, 1], samples ="
            f" {samples} at least 1"
        )
    return float(pass_rate**samples + (1 - pass_rate) ** samples)


def degenerate_share(pass_rates: Sequence[float], samples: int) -> float:
    """Expected share of groups with equal rewards: the mean of `p^K + (1 - p)^K` over tasks."""
    return sum(degenerate_probability(rate, samples) for rate in pass_rates) / len(pass_rates)


def resampling_factor(pass_rates: Sequence[float], samples: int) -> float:
    """Expected number of groups sampled until one has mixed rewards (dynamic sampling).

    Each is of a task that is drawn anew: `1 / (1 - degenerate_share)`. Infinite if rewards can
    never differ.
    """
    mixed = 1 - degenerate_share(pass_rates, samples)
    return 1 / mixed if mixed > 0 else float("inf")


def advantage_power(pass_rate: float) -> float:
    """Mean squared advantage `p (1 - p)` with the pass rate as baseline. At most 0.25."""
    return pass_rate * (1 - pass_rate)


def estimated_advantage_power(rewards: Sequence[Sequence[float]]) -> float:
    """Unbiased estimate of the mean squared advantage from the rewards of groups.

    It is the mean of the groups' sample variances. Its expectation is `Var(R | x)`, which is
    `p (1 - p)` for binary rewards. The population variance of a group of K would be too small by
    `(K - 1) / K`, because the baseline is the mean of the same samples.
    Each group has at least 2 rewards.
    """
    total = 0.0
    for group in rewards:
        mean = sum(group) / len(group)
        total += sum((reward - mean) ** 2 for reward in group) / (len(group) - 1)
    return total / len(rewards)


@dataclass(frozen=True)
class PoolSignal:
    """Learning signal of a pool of prompts.

    Attributes:
        prompts: number of prompts.
        signal: sum of `p (1 - p)` over the prompts.
        wasted: expected share of groups with equal rewards.
        per_sample: signal per sample that must be generated.
    """

    prompts: int
    signal: float
    wasted: float
    per_sample: float


def pool_signal(pass_rates: Sequence[float], samples: int) -> PoolSignal:
    """Learning signal of one pass over prompts with these pass rates, `samples` per prompt."""
    prompts = len(pass_rates)
    signal = sum(advantage_power(rate) for rate in pass_rates)
    wasted = degenerate_share(pass_rates, samples)
    return PoolSignal(prompts, signal, wasted, signal / (prompts * samples))
