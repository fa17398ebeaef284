"""Parity of sampler and trainer: do they compute the same log-probs from the same weights?

In float32 on a CPU every token must agree: the arithmetic is the same. Elsewhere single tokens may
not. Kernels round differently by batch size, and where probabilities are small a rounded logit moves
a log-prob by tenths of a nat: over thousands of tokens the worst one is 0.3 to 1 nats off in
bfloat16 although nothing is wrong. There the mean and the 99 % quantile are judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from ..batch import Metrics

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ParityLimits:
    """Largest disagreement, in nats, with which a run may train.

    Attributes:
        mean: of all tokens.
        high: of 99 % of the tokens.
        worst: of any token.
    """

    mean: float
    high: float = inf
    worst: float = inf

    def exceeded(self, found: Parity) -> str:
        """What is too large, in words; empty if nothing is. A value that is not a number is too large."""
        judged = {
            "in the mean": (found.mean, self.mean),
            "at the 99 % quantile": (found.high, self.high),
            "at worst": (found.worst, self.worst),
        }
        over = [f"{value:.2g} nats {where} (limit {limit:g})" for where, (value, limit) in judged.items() if not value <= limit]
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
        """From what `mismatch_metrics` found on `tokens` tokens."""
        mean, high, worst = (float(metrics[f"mismatch/{key}_abs_logp"]) for key in ("mean", "p99", "max"))  # type: ignore[arg-type]
        return cls(mean, high, worst, tokens)

    def __str__(self) -> str:
        return f"{self.mean:.1e} nats in the mean, {self.high:.1e} at the 99 % quantile, {self.worst:.1e} at worst, on {self.tokens} tokens"


def parity_limits(precision: Precision, device: str, outside: bool) -> ParityLimits:
    """The limits of a run.

    Args:
        precision: of the forward passes.
        device: where the model lives.
        outside: whether another program samples, with kernels of its own.
    """
    if precision == "bfloat16":
        return ParityLimits(mean=0.1, high=1.0) if outside else ParityLimits(mean=0.05, high=0.5)
    if device == "cpu":
        return ParityLimits(mean=1e-3, worst=1e-3)
    return ParityLimits(mean=1e-3, high=1e-2)  # a GPU's kernels add up in other orders


TRAINING_LIMIT = {"float32": 0.05, "bfloat16": 0.2}
"""Mean disagreement on fresh tokens, in nats, at which a run ends: its ratios are noise. The gap of a
sound run is a hundredth of that or less, so this never ends one that learns."""
