"""Difference between the trainer's log-probs and the log-probs recorded at sampling.

For stale tokens the difference is policy drift. For fresh tokens it is numerical error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..batch import Metrics, send
from ..types import LOG_RATIO_EDGES

QUANTISED_LIMIT = 0.1
"""Largest mean log-prob difference, in nats, between a quantised sampler and the policy at start.

The limit applies to the mean: single tokens can differ by several nats while the mean is 0.001.
"""

SLOPE_ERROR = 0.002
"""Largest standard error at which a slope near 0 is reported as mismatch/temperature. An alarm
starts at five times this difference from 1.
"""
SIGNIFICANT = 10.0
"""Standard errors from 0 at which any slope is reported."""

HIGH = 0.99
"""Quantile of mismatch/p99_abs_logp."""


def log_ratio_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Mean ratio, mean log-ratio and log-ratio histogram over scored tokens.

    The log-ratio is logp - old_logp; both are [S].
    """
    log_ratio = logp - old_logp
    edges = send(torch.tensor(LOG_RATIO_EDGES), logp.device)
    bins = torch.zeros(len(LOG_RATIO_EDGES) + 1, dtype=torch.float64, device=logp.device)
    bins.scatter_add_(
        0, torch.bucketize(log_ratio, edges), torch.ones_like(log_ratio, dtype=torch.float64)
    )
    ratio, mean, *counts = torch.cat(
        [_column(log_ratio.clamp(-20, 20).exp().mean(), log_ratio.mean()), bins]
    ).tolist()
    return {"train/ratio_mean": ratio, "train/log_ratio_mean": mean, "train/ratio_hist": counts}


def mismatch_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Log-prob differences between engine and trainer on tokens sampled with the current weights.

    On these tokens any difference is numerical error, not learning. With l = logp - old_logp ([S]
    each):

    - kl_k3: mean of exp(l) - 1 - l, the k3 estimate of KL(engine || trainer).
    - prob_error: mean of exp|l| (NeMo-RL's token_mult_prob_error; 1 is perfect).

    Returns:
        Metrics named mismatch/...; empty if no token is fresh.
    """
    if len(logp) == 0:
        return {}
    # In float32, exp(l) - 1 - l of a small gap is rounding error and can be negative.
    gap = (logp - old_logp).double()
    size = gap.abs()
    largest, high, mean, kl, error = _column(
        size.max(),
        size.kthvalue(math.ceil(HIGH * len(size))).values,
        size.mean(),
        (gap.clamp(-20, 20).exp() - 1 - gap).mean(),
        size.clamp_max(20).exp().mean(),
    ).tolist()
    return {
        "mismatch/max_abs_logp": largest,
        "mismatch/p99_abs_logp": high,
        "mismatch/mean_abs_logp": mean,
        "mismatch/kl_k3": kl,
        "mismatch/prob_error": error,
    }


def temperature_metrics(logp: Tensor, old_logp: Tensor, entropy: Tensor) -> Metrics:
    """Temperature of the log-probs at sampling, relative to the trainer's.

    Let logp be log-softmax(z) at token a, and old_logp log-softmax(b z) at a. The derivative of
    old_logp with respect to b, at b = 1, is z_a - E[z] = logp + H. H is the entropy of softmax(z).
    So the slope of old_logp - logp over logp + H, fitted by least squares through the origin,
    estimates b - 1, and the relative temperature is 1 / b. Numerical error has no such slope.

    Args:
        logp: [S] log-probs of the trainer on tokens sampled with the current weights.
        old_logp: [S] log-probs at sampling.
        entropy: [S] entropy of the trainer's distribution at each token, in nats.

    Returns:
        mismatch/temperature; empty if the tokens do not determine it, for example because nearly
        all have probability 1.
    """
    if len(logp) < 2:
        return {}
    gap, lever = (old_logp - logp).double(), (logp + entropy).double()
    squares, products, gaps = torch.stack(
        [lever.square().sum(), (lever * gap).sum(), gap.square().sum()]
    ).tolist()
    if not squares > 0:
        return {}
    slope = products / squares
    left = max(gaps - slope * products, 0.0)
    error = math.sqrt(left / (len(logp) - 1) / squares)
    if slope <= -1 or error > max(SLOPE_ERROR, abs(slope) / SIGNIFICANT):
        return {}
    return {"mismatch/temperature": 1 / (1 + slope)}


def outside_share(logp: Tensor, old_logp: Tensor, mask: Tensor, low: float, high: float) -> float:
    """Share of rows whose mean log-ratio over scored tokens lies outside [low, high].

    Args:
        logp: [B, T] log-probs of the trainer.
        old_logp: [B, T] log-probs at sampling.
        mask: [B, T] True for scored tokens. Rows without scored tokens do not count.
        low: lower bound, in nats.
        high: upper bound, in nats.
    """
    count = mask.sum(-1)
    mean = ((logp - old_logp) * mask).sum(-1) / count.clamp_min(1)
    outside = ((mean < low) | (mean > high)) & (count > 0)
    return float(outside.sum() / (count > 0).sum().clamp_min(1))


def _column(*numbers: Tensor) -> Tensor:
    """Stack scalars into one float64 tensor, so that the host synchronises with the device once."""
    return torch.stack([n.double() for n in numbers])
