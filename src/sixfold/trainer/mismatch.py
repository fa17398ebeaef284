"""How far the trainer's log-probs are from those recorded at sampling: drift of the policy for stale tokens, numerics for fresh ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Metrics

PARITY_LIMIT = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest disagreement between engine and trainer, in nats on one token, with which a run starts."""

QUANTISED_LIMIT = 0.1
"""Largest mean distance of a quantised sampler's log-probs from the policy's, in nats, with which a run starts. The mean, since single tokens move by
nats where the mean is a thousandth."""

# Log-ratio edges of train/ratio_hist: 11 bins, the outer two open.
RATIO_EDGES = (-1.0, -0.5, -0.2, -0.1, -0.01, 0.01, 0.1, 0.2, 0.5, 1.0)


def log_ratio_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Mean ratio, mean log-ratio and histogram over scored tokens, [S] each; log-ratio = logp - old_logp."""
    log_ratio = logp - old_logp
    counts = torch.bincount(torch.bucketize(log_ratio, torch.tensor(RATIO_EDGES, device=logp.device)), minlength=len(RATIO_EDGES) + 1)
    return {
        "train/ratio_mean": float(log_ratio.clamp(-20, 20).exp().mean()),
        "train/log_ratio_mean": float(log_ratio.mean()),
        "train/ratio_hist": [float(c) for c in counts],
    }


def mismatch_metrics(logp: Tensor, old_logp: Tensor) -> Metrics:
    """Engine against trainer on tokens that the current weights sampled, [S] each: any difference is numerics, not learning.

    kl_k3: mean of exp(l) - 1 - l, l = logp - old_logp, the k3 estimate of KL(engine || trainer). prob_error: mean of exp|l| (NeMo-RL's
    token_mult_prob_error; 1 is perfect). Empty when no token is fresh.
    """
    if len(logp) == 0:
        return {}
    gap = (logp - old_logp).double()  # in float32 exp(l) - 1 - l of a small gap is rounding, and may come out below 0
    return {
        "mismatch/max_abs_logp": float(gap.abs().max()),
        "mismatch/mean_abs_logp": float(gap.abs().mean()),
        "mismatch/kl_k3": float((gap.clamp(-20, 20).exp() - 1 - gap).mean()),
        "mismatch/prob_error": float(gap.abs().clamp_max(20).exp().mean()),
    }
