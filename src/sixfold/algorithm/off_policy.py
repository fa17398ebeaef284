"""Importance weights for tokens that another policy sampled: rho = pi_prox / pi_sampler.

log_rho = prox_logp - old_logp [B, T]: the trainer's log-probs at the start of the step, minus those
of the sampler. The ratio of the loss is then taken against prox_logp, and the two factors together
are pi / pi_sampler (decoupled PPO). Weights are constants [B, T] that multiply the policy loss. A
weight of 0 drops a token. The weight is 1 off the mask, and wherever the sampler was the proximal
policy.

A dropped token still counts in the denominators of `aggregation.py`, as in verl, TRL and OpenRLHF.
Bounds are on rho. verl's token_k1 and seq_mean_k1 bound its inverse, so asymmetric bounds are
mirrored there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import exp_clamped

Correction = Callable[[Tensor, Tensor, float | None, float | None], Tensor]


def truncated_token(log_rho: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(rho_t, cap); [B, T]. TIS (Yao et al. 2025, cap 2; verl advises 1.5 to 5).

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        cap: upper bound of the weight.
    """
    _check(log_rho, mask, None, cap)
    return _token_rho(log_rho, mask).clamp_max(cap)


def truncated_sequence(log_rho: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(prod_t rho_t, cap) on every token of the row; [B, T].

    verl rollout_is=sequence, with cap 2 to 10; TRL sequence_truncate.

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        cap: upper bound of the weight.
    """
    _check(log_rho, mask, None, cap)
    return torch.where(mask, _sequence_rho(log_rho, mask).clamp_max(cap), 1.0)


def masked_token(log_rho: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """rho_t if low <= rho_t <= high, else 0; [B, T]. IcePop (arXiv:2510.18855: 0.5 and 5).

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        low: lower bound.
        high: upper bound.
    """
    _check(log_rho, mask, low, high)
    rho = _token_rho(log_rho, mask)
    return torch.where(_outside(rho, low, high), 0.0, rho)


def masked_sequence(log_rho: Tensor, mask: Tensor, low: float | None, high: float) -> Tensor:
    """MIS: rho = prod_t rho_t on every token of the row if low <= rho <= high, else 0.

    MIS (Liu et al. 2025, "When Speed Kills Stability"). TRL's default, with high 3.

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        low: lower bound. None: no lower bound.
        high: upper bound.
    """
    _check(log_rho, mask, low, high)
    rho = _sequence_rho(log_rho, mask)
    return torch.where(mask, torch.where(_outside(rho, low, high), 0.0, rho), 1.0)


def geometric_mask(log_rho: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """rho_t, or 0 on the whole row if exp(mean_t log rho_t) is outside [low, high].

    NeMo-RL seq-mask-tis: 0.999 and 1.002. The mean treats long and short rows alike, while the
    product leaves any band as rows grow.

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        low: lower bound.
        high: upper bound.
    """
    _check(log_rho, mask, low, high)
    mean = _zero_off_mask(log_rho, mask).sum(-1, keepdim=True) / mask.sum(
        -1, keepdim=True
    ).clamp_min(1)
    return torch.where(
        mask & _outside(exp_clamped(mean), low, high), 0.0, _token_rho(log_rho, mask)
    )


def token_ratio(log_rho: Tensor, mask: Tensor, cap: float | None = None) -> Tensor:
    """rho_t unchanged. Tokens above the cap are rejected (0), not truncated.

    Decoupled PPO (arXiv:2110.00641; arXiv:2505.24298 eq. 5, without a cap; AReaL's code rejects
    above 5).

    Args:
        log_rho: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        cap: upper bound. None: no bound.
    """
    high = torch.inf if cap is None else cap
    _check(log_rho, mask, None, high)
    rho = _token_rho(log_rho, mask)
    return torch.where(rho > high, 0.0, rho)


CORRECTIONS: dict[str, Correction] = {
    "truncated": lambda log_rho, mask, low, high: truncated_token(
        log_rho, mask, _require(high, "high")
    ),
    "truncated-sequence": lambda log_rho, mask, low, high: truncated_sequence(
        log_rho, mask, _require(high, "high")
    ),
    "masked": lambda log_rho, mask, low, high: masked_token(
        log_rho, mask, _require(low, "low"), _require(high, "high")
    ),
    "masked-sequence": lambda log_rho, mask, low, high: masked_sequence(
        log_rho, mask, low, _require(high, "high")
    ),
    "geometric": lambda log_rho, mask, low, high: geometric_mask(
        log_rho, mask, _require(low, "low"), _require(high, "high")
    ),
    "decoupled": lambda log_rho, mask, low, high: token_ratio(log_rho, mask, high),
}
"""Corrections by name, all with the arguments (log_rho, mask, low, high). For the truncated
corrections and for decoupled, `high` is the cap.
"""


@torch.no_grad()
def negative_sequence_mask(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Rows to keep: all but those with A < 0 and mean_t (old_logp - logp) > delta.

    DeepSeek-V3.2 (arXiv:2512.02556 eq. 9). Samples that the policy has already moved away from need
    not be pushed further. A row's A is the mean over its sampled tokens.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs of the sampler.
        advantages: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        delta: threshold in nats. The paper gives no value; TRL suggests 0.5.

    Returns:
        bool [B].
    """
    _check(logp, mask)
    _check(old_logp, mask)
    _check(advantages, mask)
    length = mask.sum(-1).clamp_min(1)
    gone = _zero_off_mask(old_logp - logp, mask).sum(-1) / length > delta
    return ~(gone & (_zero_off_mask(advantages, mask).sum(-1) < 0))


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n sampled tokens, in [0, 1].

    Below 0.3 there is little left to learn from. Measure it on raw ratios: truncation hides the
    effect.

    Returns:
        scalar float64, NaN if nothing was sampled.
    """
    _check(weights, mask)
    w = weights[mask].double()
    return w.sum().square() / w.square().sum().clamp_min(torch.finfo(torch.float64).tiny) / len(w)


def chi2(weights: Tensor, mask: Tensor) -> Tensor:
    """mean(w^2) - 1 over the sampled tokens.

    For raw ratios this is the chi-squared divergence of the two policies. Values above 1 indicate
    trouble.

    Returns:
        scalar float64, NaN if nothing was sampled.
    """
    _check(weights, mask)
    return weights[mask].double().square().mean() - 1


def _zero_off_mask(table: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, table.detach(), 0.0)


def _token_rho(log_rho: Tensor, mask: Tensor) -> Tensor:
    return exp_clamped(_zero_off_mask(log_rho, mask))


def _sequence_rho(log_rho: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]."""
    return exp_clamped(_zero_off_mask(log_rho, mask).sum(-1, keepdim=True))


def _outside(rho: Tensor, low: float | None, high: float) -> Tensor:
    # Compare in this direction, so that a NaN ratio is not outside: it then reaches the loss and
    # stops the run, instead of vanishing as a dropped token.
    return (rho > high) if low is None else (rho < low) | (rho > high)


def _require(bound: float | None, name: str) -> float:
    if bound is None:
        raise ValueError(f"this correction needs its {name} bound")
    return bound


def _check(table: Tensor, mask: Tensor, low: float | None = None, high: float = torch.inf) -> None:
    if table.shape != mask.shape or mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"a table and its bool mask must be [B, T] of one shape: got {tuple(table.shape)},"
            f" {tuple(mask.shape)}, mask {mask.dtype}"
        )
    if not (low is None or 0 <= low <= 1) or not high >= 1:
        raise ValueError(
            f"the bounds of a ratio must have 1, the ratio on-policy, between them: got {low} and"
            f" {high}"
        )
