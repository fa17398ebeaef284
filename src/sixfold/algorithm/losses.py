"""Token losses: pure functions on [B, T], per-token values out. Nothing here averages: the weights do (`aggregation.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """A clipped loss and what its clip did, [B, T] each. outside: ratio out of the band. active: the clip removed the gradient."""

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    active: Tensor


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: its gradient is REINFORCE's (Williams 1992). logp, advantages [B, T] -> [B, T]."""
    _check(logp, advantages)
    return -advantages * logp


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old_logp) (PPO, arXiv:1707.06347 eq. 7).

    The gradient vanishes in two of the six cells: A > 0 with r above the band, A < 0 with r below it. All arguments [B, T].
    """
    _check(logp, old_logp, advantages)
    # Clamped before exp: one token far off the policy would otherwise make the whole step's gradient inf or NaN.
    ratio = (logp - old_logp).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        outside = ratio != clipped
        active = (clipped * advantages < ratio * advantages) & outside
    return Surrogate(loss, ratio, outside, active)


def _check(*tables: Tensor) -> None:
    shapes = {tuple(t.shape) for t in tables}
    if len(shapes) != 1 or tables[0].ndim != 2:
        raise ValueError(f"token losses take [B, T] tensors of one shape, got {sorted(shapes)}")
