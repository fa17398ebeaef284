"""Estimators of KL(policy || reference) from one sampled token (Schulman 2020).

joschu.net/blog/kl-approx.html. r = logp - ref_logp, on [B, T].

As values, k1 and k3 are unbiased, k2 is biased, and k3 is never negative. As loss terms their
gradients differ from their values: k1 has zero expected gradient, k2 gives the gradient of
KL(policy || reference), k3 that of KL(reference || policy) (arXiv:2510.01555). In the reward, use
k1. In the loss, use k2, "k3+" or `unbiased`. They give the KL of each token alone: in the loss, a
token gets no credit for the states that it leads to.

Peers clamp more: verl k3 to +-10, OpenRLHF every estimator to +-10. Here only the argument of an
exponential is clamped, r to +-20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from .losses import exp_clamped


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """r."""
    _check(logp, ref_logp)
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """r^2 / 2."""
    _check(logp, ref_logp)
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(-r) + r - 1, r clamped to +-20 before the exponential."""
    _check(logp, ref_logp)
    r = (logp - ref_logp).clamp(-20.0, 20.0)
    return (-r).exp() + r - 1


def k3_plus(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (straight-through; verl's "k3+")."""
    gradient = k2(logp, ref_logp)
    return k3(logp, ref_logp).detach() + (gradient - gradient.detach())


def unbiased(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(logp - old_logp) k3, differentiable in both factors.

    DeepSeek-V3.2 (arXiv:2512.02556 eq. 7). This is the gradient of KL(policy || reference) for
    tokens sampled by old_logp's policy. TRL does the same by default (under GSPO with the ratio of
    the row). OpenRLHF's unbiased_gradient instead multiplies r grad logp by the ratio capped at 10.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs at sampling. Must be a constant, also on-policy, where it equals
            logp.
        ref_logp: [B, T] log-probs under the reference.

    Returns:
        [B, T].
    """
    _check(logp, old_logp, ref_logp)
    return exp_clamped(logp - old_logp) * k3(logp, ref_logp)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}


@dataclass
class AdaptiveBeta:
    """KL weight that steers the KL to `target` (arXiv:1909.08593 section 2.2).

    e = clip(KL / target - 1, +-0.2), beta <- beta (1 + e n / horizon)

    `beta` is the whole state.

    Args:
        beta: initial weight.
        target: KL to reach, in nats.
        horizon: in the unit that `update` counts; 10,000 samples in the paper.

    Raises:
        ValueError: unless all three are positive.
    """

    beta: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not min(self.beta, self.target, self.horizon) > 0:
            raise ValueError(
                f"beta, target and horizon must be positive: got {self.beta}, {self.target},"
                f" {self.horizon}"
            )

    def update(self, kl: float, n: int) -> None:
        """Adapt to one step's mean KL, measured on n samples.

        Raises:
            ValueError: if the KL is not finite: it would stay in beta forever.
        """
        if not isfinite(kl):
            raise ValueError(f"the KL that steers beta must be finite: got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # Cap n: counted in tokens it easily exceeds 5 horizons, and the factor would turn negative.
        self.beta *= 1 + error * min(n / self.horizon, 1.0)


def _check(*tables: Tensor) -> None:
    shapes = {tuple(t.shape) for t in tables}
    if len(shapes) != 1:
        raise ValueError(f"log-probs must be of one shape, got {sorted(shapes)}")
