"""Losses with the ratio of a whole sequence. Same tables as `losses.py`, and the mask.

mask is [B, T] bool. Means of a row are over its scored tokens. A row's advantage is the mean of the
advantages of its scored tokens.

Every scored token carries the loss of its row. The mean over sequences of the papers is then the
aggregation "sequence", in values and gradients. A micro-batch may split the batch between rows, but
not within one.

Values off the mask may be junk or NaN: they are replaced before any arithmetic. There the loss is
0, the ratio 1, and `outside` and `active` are False.
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
    """GSPO (arXiv:2507.18071 eq. 5 and 7).

    -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t(logp - old_logp))

    PPO's surrogate on the geometric mean of the row's ratios, so a row is clipped as a whole. With
    aggregation "sequence" the gradient of a token is -s A / |o| / B. Peers: verl clamps log s at
    +10 from above; here +-20.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        mask: [B, T] bool, True for scored tokens.
        clip_low: lower width of the band.
        clip_high: upper width of the band.
    """
    logp, old_logp, advantages = _zero_off_mask(mask, logp, old_logp, advantages)
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
    """GSPO-token (arXiv:2507.18071 eq. 13-14); sg stops the gradient.

    -min(s_t A_t, clip(s_t) A_t), s_t = sg[s] pi_t / sg[pi_t]

    The value of s_t is the row's s, and its gradient is that of the token, so advantages may differ
    by token. If they do not, it equals GSPO. Arguments: see `sequence_surrogate`.
    """
    logp, old_logp, advantages = _zero_off_mask(mask, logp, old_logp, advantages)
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
    """LUSPO (arXiv:2602.05261): |o| times GSPO's loss of the row.

    With aggregation "sequence" the gradient of a token is -s A / B, for any |o|. Arguments: see
    `sequence_surrogate`.
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
    """GMPO (arXiv:2507.20673 eq. 4).

    -A exp(mean_t c_t), c_t = min(log r_t, clip_high) where A > 0, max(log r_t, -clip_low) elsewhere

    The clip is PPO's, in log space, for each token before the geometric mean. A clipped token loses
    its gradient; the row does not. `ratio` is the row's exp(mean_t c_t); `outside` and `active` are
    about the token's log r_t. Peers: verl averages over the micro-batch, so its gradient depends on
    the split; here the weights average.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        mask: [B, T] bool, True for scored tokens.
        clip_low: largest decrease of a log-ratio.
        clip_high: largest increase of a log-ratio.
    """
    logp, old_logp, advantages = _zero_off_mask(mask, logp, old_logp, advantages)
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
    """Kimi k1.5 (arXiv:2501.12599 eq. 3) and K2 (arXiv:2507.20534 section 3.2.3).

    (A - tau sum_t(logp - old_logp))^2, A = r - mean of the group

    The mean of the group stands for tau log Z of the optimal policy. With aggregation "sequence"
    the gradient of a token on the old policy is -2 tau A / B (k1.5 writes its step as this over
    2 tau). Away from the old policy the square pulls back, also where A = 0 and without a clamp.
    This pull is the trust region. `ratio` is the exponential of the sum. There is no band, so
    `outside` and `active` are False.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        mask: [B, T] bool, True for scored tokens.
        tau: strength of the pull. Not published.
    """
    logp, old_logp, advantages = _zero_off_mask(mask, logp, old_logp, advantages)
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
    """VESPO (arXiv:2602.10693); sg stops the gradient.

    -sg(W^k exp(lam (1 - W))) A log pi, W = prod_t r_t of the row

    The weight is 1 at W = 1, largest at W = k / lam, and falls to 0 on both sides. It is a token
    loss, averaged by "token". `ratio` is W. There is no band, so `outside` and `active` are False.
    Peers: TRL also clamps each token's log-ratio to +-20, and log W from below at log 1e-8.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        mask: [B, T] bool, True for scored tokens.
        k_pos: k where the token's A >= 0.
        lam_pos: lam where the token's A >= 0.
        k_neg: k elsewhere.
        lam_neg: lam elsewhere.
    """
    logp, old_logp, advantages = _zero_off_mask(mask, logp, old_logp, advantages)
    log_w = _row_sum(logp - old_logp, mask).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    positive = advantages >= 0
    k = torch.full_like(log_w, k_neg).masked_fill(positive, k_pos)
    lam = torch.full_like(log_w, lam_neg).masked_fill(positive, lam_pos)
    # One exponential: W^k alone overflows float32 where the other factor is 0, and inf * 0 is NaN.
    weight = (k * log_w + lam * (1.0 - log_w.exp())).exp()
    nowhere = torch.zeros_like(mask)
    return Surrogate(-weight * advantages * logp, log_w.exp(), nowhere, nowhere)


def _zero_off_mask(mask: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    check_shapes(mask, *tables)
    return tuple(torch.where(mask, t, 0.0) for t in tables)


def _row_sum(table: Tensor, mask: Tensor) -> Tensor:
    """[B, T] sum of each row of a cleaned table, on every scored token; 0 elsewhere."""
    return torch.where(mask, table.sum(-1, keepdim=True), 0.0)


def _row_mean(table: Tensor, mask: Tensor) -> Tensor:
    """[B, T] mean over a row's scored tokens, on each of them; 0 elsewhere."""
    return _row_sum(table, mask) / mask.sum(-1, keepdim=True).clamp_min(1)
