"""How far the trainer's log-probs are from those recorded at sampling: drift of the policy for stale tokens, numerics for fresh ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..batch import Metrics, send

QUANTISED_LIMIT = 0.1
"""Largest mean distance of a quantised sampler's log-probs from the policy's, in nats, with which a run starts. The mean, since single tokens move by
nats where the mean is a thousandth."""

HIGH = 0.99
"""Share of tokens whose disagreement is at most mismatch/p99_abs_logp."""

# Log-ratio edges of train/ratio_hist: 11 bins, the outer two open.
RATIO_EDGES = (-1.0, -0.5, -0.2, -0.1, -0.01, 0.01, 0.1, 0.2, 0.5, 1.0)


def log_ratio_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Mean ratio, mean log-ratio and histogram over scored tokens, [S] each; log-ratio = logp - old_logp."""
    log_ratio = logp - old_logp
    edges = send(torch.tensor(RATIO_EDGES), logp.device)
    bins = torch.zeros(len(RATIO_EDGES) + 1, dtype=torch.float64, device=logp.device)
    bins.scatter_add_(0, torch.bucketize(log_ratio, edges), torch.ones_like(log_ratio, dtype=torch.float64))
    ratio, mean, *counts = torch.cat([_column(log_ratio.clamp(-20, 20).exp().mean(), log_ratio.mean()), bins]).tolist()
    return {"train/ratio_mean": ratio, "train/log_ratio_mean": mean, "train/ratio_hist": counts}


def mismatch_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Engine against trainer on tokens that the current weights sampled, [S] each: any difference is numerics, not learning.

    kl_k3: mean of exp(l) - 1 - l, l = logp - old_logp, the k3 estimate of KL(engine || trainer). prob_error: mean of exp|l| (NeMo-RL's
    token_mult_prob_error; 1 is perfect). Empty when no token is fresh.
    """
    if len(logp) == 0:
        return {}
    gap = (logp - old_logp).double()  # in float32 exp(l) - 1 - l of a small gap is rounding, and may come out below 0
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


def outside_share(logp: Tensor, old_logp: Tensor, mask: Tensor, low: float, high: float) -> float:
    """Share of rows whose mean log-ratio over scored tokens lies outside [low, high].

    Args:
        logp: [B, T] log-probs of the trainer.
        old_logp: [B, T] log-probs at sampling.
        mask: [B, T] True for scored tokens. Rows without any do not count.
        low: lower end of the band, in nats.
        high: upper end of the band, in nats.
    """
    count = mask.sum(-1)
    mean = ((logp - old_logp) * mask).sum(-1) / count.clamp_min(1)
    outside = ((mean < low) | (mean > high)) & (count > 0)
    return float(outside.sum() / (count > 0).sum().clamp_min(1))


def _column(*numbers: Tensor) -> Tensor:
    """Scalars as one tensor of float64, so that the host waits for the device once."""
    return torch.stack([n.double() for n in numbers])
