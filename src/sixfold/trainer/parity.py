"""Parity of sampler and trainer: both must compute the same log-probs from the same weights.

In float32 on a CPU every token must agree, because the arithmetic is the same. Elsewhere single
tokens may differ. Kernels round differently by batch size, and where probabilities are small a
rounded logit moves a log-prob by tenths of a nat. In bfloat16 the maximum over thousands of tokens
is 0.3 to 1 nats although nothing is wrong. So only the mean and the 99th percentile are limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from ..batch import Metrics, number

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ParityLimits:
    """Largest log-prob difference, in nats, with which a run may train.

    Attributes:
        mean: limit of the mean over all tokens.
        high: limit of the 99th percentile.
        worst: limit of the maximum.
    """

    mean: float
    high: float = inf
    worst: float = inf

    def exceeded(self, found: Parity) -> str:
        """Describe which limits are exceeded; empty if none is. NaN exceeds every limit."""
        judged = {
            "mean difference": (found.mean, self.mean),
            "99th percentile": (found.high, self.high),
            "maximum": (found.worst, self.worst),
        }
        over = [
            f"{name} {value:.2g} nats (limit {limit:g})"
            for name, (value, limit) in judged.items()
            if not value <= limit
        ]
        return " and ".join(over)


@dataclass(frozen=True)
class Parity:
    """Distribution of |sampler's log-prob - trainer's log-prob| over tokens, in nats."""

    mean: float
    high: float
    worst: float
    tokens: int

    @classmethod
    def of(cls, metrics: Metrics, tokens: int) -> Parity:
        """Parity from the metrics that `mismatch_metrics` computed on `tokens` tokens."""
        mean, high, worst = (
            number(metrics, f"mismatch/{key}_abs_logp") for key in ("mean", "p99", "max")
        )
        return cls(mean, high, worst, tokens)

    def __str__(self) -> str:
        return (
            f"mean difference {self.mean:.1e} nats, 99th percentile {self.high:.1e},"
            f" maximum {self.worst:.1e}, over {self.tokens} tokens"
        )


def parity_limits(precision: Precision, device: str, outside: bool) -> ParityLimits:
    """Parity limits of a run.

    Args:
        outside: True if another program samples, with its own kernels.
    """
    if precision == "bfloat16":
        return ParityLimits(mean=0.1, high=1.0) if outside else ParityLimits(mean=0.05, high=0.5)
    if device == "cpu":
        return ParityLimits(mean=1e-3, worst=1e-3)
    return ParityLimits(mean=1e-3, high=1e-2)  # GPU kernels sum in a different order


TRAINING_LIMIT = {"float32": 0.05, "bfloat16": 0.2}
"""Mean log-prob difference on fresh tokens, in nats, above which a run ends.

Above it the ratios are noise. The gap of a sound run is at most a hundredth of it, so this limit
never ends a run that learns.
"""
