"""Entropy of the policy: an estimate from samples, and rules that keep it from collapsing.

Entropies are in nats. Tables are [B, T], and the mask is bool.

Where advantage and log-prob go together, the entropy falls (arXiv:2505.22617). Clip-Cov and KL-Cov
hold back the few tokens with the largest covariance. A rule selects tokens once for the whole step,
never per micro-batch: its means and counts are those of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor


def sampled_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """-mean of logp over the sampled tokens; scalar, 0 if nothing was sampled.

    Needs no logits. Unbiased if rows have one length, otherwise too small by O(1 / B). It is a
    number to log and is detached: its gradient would not be that of the entropy, because E[grad log
    pi] = 0.
    """
    _check(mask, logp)
    return -torch.where(mask, logp.detach(), 0.0).sum() / mask.sum().clamp_min(1)


@dataclass
class AdaptiveEntropy:
    """Coefficient of an entropy bonus that holds the entropy at `target`.

    Skywork-OR1 (arXiv:2505.22312 section 4.2). It grows by delta while the entropy is at or below
    the target, shrinks above it, and stays in [0, highest]. It applies only at or below the target.
    The paper applies it to the step whose entropy was measured; TRL decides with the entropy of the
    previous step. `coefficient` is the whole state.

    Args:
        coefficient: initial coefficient.
        target: entropy to hold, in nats.
        delta: change per step.
        highest: maximum coefficient.

    Raises:
        ValueError: unless 0 <= coefficient <= highest and delta > 0.
    """

    coefficient: float
    target: float
    delta: float
    highest: float

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient <= self.highest or not self.delta > 0:
            raise ValueError(
                "the coefficient must be in [0, highest] and delta positive: got"
                f" {self.coefficient}, highest {self.highest}, delta {self.delta}"
            )

    def applied(self, entropy: float) -> float:
        """The coefficient to use at this entropy: 0 above the target."""
        return self.coefficient if entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt to one step's entropy.

        Raises:
            ValueError: if the entropy is not finite.
        """
        if not isfinite(entropy):
            raise ValueError(f"the entropy that steers the bonus must be finite: got {entropy}")
        step = self.delta if entropy <= self.target else -self.delta
        self.coefficient = min(max(self.coefficient + step, 0.0), self.highest)


@torch.no_grad()
def covariance(advantages: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(logp - mean logp) per token (arXiv:2505.22617 eq. 11).

    Args:
        advantages: [B, T].
        logp: [B, T] log-probs.
        mask: [B, T] bool, True for sampled tokens. The means are over these tokens.

    Returns:
        [B, T], 0 off the mask.
    """
    _check(mask, advantages, logp)
    sampled = mask.sum().clamp_min(1)

    def centred(table: Tensor) -> Tensor:
        value = torch.where(mask, table, 0.0)
        return torch.where(mask, value - value.sum() / sampled, 0.0)

    return centred(advantages) * centred(logp)


def clip_cov_tokens(
    advantages: Tensor,
    logp: Tensor,
    mask: Tensor,
    fraction: float,
    low: float,
    high: float,
    seed: int,
) -> Tensor:
    """Clip-Cov: tokens that lose their gradient (arXiv:2505.22617 eq. 11-12).

    At most floor(fraction N) of the N sampled tokens with low < covariance < high. If more qualify,
    the pick depends on the seed and the covariances, not on the order of rows. verl takes at least
    one token, and picks anew in every update among the tokens that the ratio clip does not have.
    Here the pick is made once per step, before the first update, regardless of the clip.

    Args:
        advantages: [B, T].
        logp: [B, T] log-probs.
        mask: [B, T] bool, True for sampled tokens.
        fraction: share of tokens; released code 2e-4.
        low: lower bound of the covariance; released code 1.
        high: upper bound of the covariance; released code 5.
        seed: seed of the pick.

    Returns:
        bool [B, T].
    """
    cov = covariance(advantages, logp, mask)
    candidates = mask & (cov > low) & (cov < high)
    index = candidates.flatten().nonzero().squeeze(-1)
    index = index[cov.flatten()[index].argsort(stable=True)]
    shuffled = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed)).to(
        index.device
    )
    return _marked(mask, index[shuffled][: _share(fraction, mask)])


def kl_cov_tokens(advantages: Tensor, logp: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """KL-Cov: tokens to hold back with beta |logp - old_logp| (arXiv:2505.22617 eq. 13-14).

    These are the floor(fraction N) tokens with the largest covariance. The released code has
    fraction 2e-4 to 2e-3, beta 1, and no ratio clip on any token. verl takes at least one token.

    Args:
        advantages: [B, T].
        logp: [B, T] log-probs.
        mask: [B, T] bool, True for sampled tokens.
        fraction: share of tokens.

    Returns:
        bool [B, T].
    """
    cov = torch.where(mask, covariance(advantages, logp, mask), -torch.inf)
    return _marked(
        mask, cov.flatten().argsort(descending=True, stable=True)[: _share(fraction, mask)]
    )


@torch.no_grad()
def top_entropy_tokens(entropy: Tensor, mask: Tensor, quantile: float = 0.8) -> Tensor:
    """Tokens that keep their gradient: sampled, with entropy at or above a quantile.

    arXiv:2506.01939 trains on the top 20 %.

    Args:
        entropy: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        quantile: quantile of the sampled tokens' entropies, by linear interpolation.

    Returns:
        bool [B, T].

    Raises:
        ValueError: if quantile is outside [0, 1].
    """
    _check(mask, entropy)
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    ordered = entropy[mask].sort().values
    if len(ordered) == 0:
        return mask.clone()
    # Not torch.quantile: it refuses more than 16 million values, one step of long completions.
    position = round(quantile * (len(ordered) - 1), 9)  # 0.55 * 100 is 55.00000000000001
    below, above = ordered[int(position)], ordered[min(int(position) + 1, len(ordered) - 1)]
    return mask & (entropy >= below + (above - below) * (position - int(position)))


def _share(fraction: float, mask: Tensor) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}")
    # 0.29 * 100 is 28.999999999999996.
    return int(fraction * int(mask.sum()) + 1e-9)


def _marked(mask: Tensor, index: Tensor) -> Tensor:
    """Bool of mask's shape, True at the flat positions `index`."""
    return torch.zeros_like(mask).flatten().index_fill(0, index, True).view_as(mask)


def _check(mask: Tensor, *tables: Tensor) -> None:
    shapes = {tuple(t.shape) for t in (mask, *tables)}
    if len(shapes) != 1 or mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"tables and a bool mask must be [B, T] of one shape: got {sorted(shapes)}, mask"
            f" {mask.dtype}"
        )
