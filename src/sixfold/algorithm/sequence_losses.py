"""Losses whose ratio is the whole sequence's. Same tables as `losses.py`, and the mask [B, T] bool:
a row's mean is over its scored tokens.

Every scored token carries its row's loss, so that the mean over sequences that the papers write is
the aggregation "sequence", values and gradients; micro-batches may split the batch between rows,
never inside one. What stands under the mask may be junk or NaN: it is replaced before any
arithmetic. There loss is 0, ratio 1, `outside` and `active` False. A row's advantage is the mean of
its scored tokens'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .losses import LARGEST_LOG_RATIO, Surrogate, check_shapes, clipped_surrogate, exp_clamped


def sequence_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t(logp - old_logp)) (GSPO,
    arXiv:2507.18071 eq. 5 and 7).

    PPO's surrogate on the geometric mean of the row's ratios, so a row is clipped whole. With
    aggregation "sequence" a token's gradient is -s A / |o| / B. Peers: verl clamps log s at +10
    from above; here +-20.
    """
    logp, old_logp, advantages = _scored(mask, logp, old_logp, advantages)
    log_s = _row_mean(logp - old_logp, mask)
    return clipped_surrogate(
        log_s, torch.zeros_like(log_s), _row_mean(advantages, mask), clip_low, clip_high
    )


def sequence_token_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """-min(s_t A_t, clip(s_t) A_t), s_t = sg[s] pi_t / sg[pi_t], sg: no gradient (GSPO-token,
    arXiv:2507.18071 eq. 13-14).

    The value of s_t is the row's s, its gradient the token's own: advantages may differ by token.
    Equal to GSPO where they do not.
    """
    logp, old_logp, advantages = _scored(mask, logp, old_logp, advantages)
    log_s = _row_mean(logp - old_logp, mask).detach() + (logp - logp.detach())
    return clipped_surrogate(log_s, torch.zeros_like(log_s), advantages, clip_low, clip_high)


def length_scaled_sequence_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """|o| times GSPO's loss of the row (LUSPO, arXiv:2602.05261): with aggregation "sequence" a
    token's gradient is -s A / B, whatever |o|.
    """
    s = sequence_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high)
    return s._replace(loss=s.loss * mask.sum(-1, keepdim=True))


def geometric_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """-A exp(mean_t c_t), c_t = log r_t held at most clip_high where A > 0, at least -clip_low
    where A < 0 (GMPO, arXiv:2507.20673 eq. 4).

    The clip is PPO's, in log space and token by token, before the geometric mean: a clipped token
    loses its gradient, the row does not.
    ratio: the row's exp(mean_t c_t); outside, active: the token's log r_t. Peers: verl averages
    over the micro-batch it sees, so its gradient depends on the split; here the weights average.
    """
    logp, old_logp, advantages = _scored(mask, logp, old_logp, advantages)
    log_ratio, advantage = logp - old_logp, _row_mean(advantages, mask)
    kept = torch.where(
        advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio = exp_clamped(_row_mean(kept, mask))
    outside = (log_ratio > clip_high) | (log_ratio < -clip_low)
    return Surrogate(
        -ratio * advantage,
        ratio.detach(),
        outside.detach(),
        ((kept != log_ratio) & (advantage != 0)).detach(),
    )


def mirror_descent(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, tau: float
) -> Surrogate:
    """(A - tau sum_t(logp - old_logp))^2, A = r - mean of the group (Kimi k1.5, arXiv:2501.12599
    eq. 3; K2, arXiv:2507.20534 section 3.2.3).

    The group's mean stands for tau log Z of the optimal policy. With aggregation "sequence" a
    token's gradient on the old policy is -2 tau A / B (k1.5 writes its step as this over 2 tau).
    Off it the square pulls back, also where A = 0, and unclamped: that pull is the trust region.
    ratio: exp of the sum; no band, so `outside`, `active` are False. tau is not published.
    """
    logp, old_logp, advantages = _scored(mask, logp, old_logp, advantages)
    log_ratio = _row_sum(logp - old_logp, mask)
    nowhere = torch.zeros_like(mask)
    return Surrogate(
        (_row_mean(advantages, mask) - tau * log_ratio).square(),
        exp_clamped(log_ratio).detach(),
        nowhere,
        nowhere,
    )


def power_weight(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    k_pos: float,
    lam_pos: float,
    k_neg: float,
    lam_neg: float,
) -> Surrogate:
    """-sg(W^k exp(lam (1 - W))) A log pi, W = prod_t r_t of the row, sg: no gradient (VESPO,
    arXiv:2602.10693).

    k, lam are the positive pair where the token's A >= 0, the negative elsewhere. The weight is 1
    at W = 1, largest at W = k / lam, and falls to 0 on both sides: a token loss, averaged by
    "token". ratio: W; no band, so `outside`, `active` are False. Peers: TRL also clamps each
    token's log-ratio to +-20, and log W from below at log 1e-8.
    """
    logp, old_logp, advantages = _scored(mask, logp, old_logp, advantages)
    log_w = _row_sum(logp - old_logp, mask).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    positive = advantages >= 0
    k = torch.full_like(log_w, k_neg).masked_fill(positive, k_pos)
    lam = torch.full_like(log_w, lam_neg).masked_fill(positive, lam_pos)
    # One exponential: W^k alone overflows float32 where the other factor is 0, and inf * 0 is NaN.
    weight = (k * log_w + lam * (1.0 - log_w.exp())).exp()
    nowhere = torch.zeros_like(mask)
    return Surrogate(-weight * advantages * logp, log_w.exp(), nowhere, nowhere)


def _scored(mask: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    check_shapes(mask, *tables)
    return tuple(torch.where(mask, t, 0.0) for t in tables)


def _row_sum(table: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row of a cleaned table, on every scored token of the row; 0 elsewhere."""
    return torch.where(mask, table.sum(-1, keepdim=True), 0.0)


def _row_mean(table: Tensor, mask: Tensor) -> Tensor:
    """The mean over a row's scored tokens, on each of them; 0 elsewhere."""
    return _row_sum(table, mask) / mask.sum(-1, keepdim=True).clamp_min(1)
