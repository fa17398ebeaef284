"""Estimators of KL(policy || reference) from one sampled token (Schulman 2020, joschu.net/blog/kl-approx.html). r = logp - ref_logp, on [B, T].

Values: k1 and k3 are unbiased, k2 is biased; k3 is never negative. As loss terms their gradients differ from what their values mean: k1 has zero
expected gradient, k2 gives the gradient of KL(policy || reference), k3 that of KL(reference || policy) (arXiv:2510.01555). In the reward, k1
is right.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """r."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """r^2 / 2."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(-r) + r - 1, r clamped to +-20 before the exponential."""
    r = (logp - ref_logp).clamp(-20.0, 20.0)
    return (-r).exp() + r - 1


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
