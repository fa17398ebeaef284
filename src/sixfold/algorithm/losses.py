"""Token losses: pure functions on [B, T] that return per-token values. They do not average.

Averaging is done by the weights (`aggregation.py`). Arguments:

    logp        log-probs under the policy being trained; the only table with a gradient
    old_logp    log-probs under the policy before the update
    advantages  constants

There is no mask. Callers pass tables that are 0 where nothing was sampled, because NaN there would
reach the gradient as NaN * 0. Losses that read a whole row take the mask: `sequence_losses.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Clamp log-ratios: otherwise one token far off the policy makes the whole step's gradient inf or
# NaN. Beyond the clamp the ratio is constant and has no gradient.
LARGEST_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """A token loss and the effect of its clip, [B, T] each. Only the loss carries a gradient.

    Attributes:
        loss: token loss.
        ratio: importance ratio that the loss weighs or clips.
        outside: True where the ratio is outside the clip band.
        active: True where the clip removed the gradient.
    """

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    active: Tensor


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE loss: -A log pi (Williams 1992).

    Args:
        logp: [B, T] log-probs under the policy.
        advantages: [B, T].

    Returns:
        [B, T] token losses.
    """
    check_shapes(logp, advantages)
    return -advantages * logp


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old_logp)

    The gradient vanishes in two of the six cells: A > 0 with r above the band, and A < 0 with r
    below it. `dual_clip` also removes the gradient where A < 0 and r is above the cap. The same
    function is written min(r, delta) A for the first term (arXiv:2505.07291 section 3.4). Peers:
    verl caps at c = 3 by default; OpenRLHF (dual clip) and TRL (delta) do not cap by default.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        clip_low: lower width of the band.
        clip_high: upper width of the band.
        dual_clip: c > 1 + clip_high. Where A < 0 the loss is at most -c A (arXiv:1912.09729 eq. 5).
            None: off.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = torch.where(
            advantages < 0, torch.maximum(objective, dual_clip * advantages), objective
        )
    # The objective is r A wherever the gradient flows, and a constant times A elsewhere.
    return Surrogate(
        -objective,
        ratio.detach(),
        (ratio != clipped).detach(),
        (objective != ratio * advantages).detach(),
    )


def clipped_weight(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, cap_low: float | None, cap_high: float
) -> Surrogate:
    """CISPO (arXiv:2506.13585 eq. 4-5); sg stops the gradient.

    -sg(clip(r, 1 - cap_low, 1 + cap_high)) A log pi

    The weight is bounded but no token loses its gradient: `active` is False everywhere. Peers: verl
    caps at 1 + epsilon_high, as here. TRL caps at epsilon_high itself, so its 5 (ScaleRL,
    arXiv:2510.13786) is cap_high = 4 here.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        cap_low: lower width of the band. None: no lower bound, as in the paper's runs.
        cap_high: upper width of the band.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp).detach()
    weight = ratio.clamp(0.0 if cap_low is None else 1.0 - cap_low, 1.0 + cap_high)
    return Surrogate(
        -weight * advantages * logp,
        ratio,
        ratio != weight,
        torch.zeros_like(ratio, dtype=torch.bool),
    )


def soft_gate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, tau: float, tau_negative: float
) -> Surrogate:
    """SAPO (arXiv:2511.20347 eq. 5-6).

    -(4 / t) sigmoid(t (r - 1)) A, t = tau where A > 0 else tau_negative

    The gradient is that of r A times 4 p (1 - p), where p is the sigmoid: the factor is 1 at r = 1
    and fades on both sides. There is no band: `outside` and `active` are False. At r = 1 the loss
    is -2 A / t, not -A; the offset has no gradient.

    Args:
        logp: [B, T] log-probs under the policy.
        old_logp: [B, T] log-probs under the policy before the update.
        advantages: [B, T].
        tau: temperature where A > 0.
        tau_negative: temperature elsewhere.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp)
    temperature = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau)
    gate = 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-gate * advantages, ratio.detach(), nowhere, nowhere)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Clipped critic loss of PPO2 (OpenAI Baselines).

    0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    With the larger of the two errors, a value outside the band has a gradient only where the clip
    would reduce its error. Peers: verl and OpenRLHF compute the same, with clip 0.5.

    Args:
        values: [B, T] V of the critic.
        old_values: [B, T] V at collection.
        returns: [B, T] R.
        clip: half-width of the band. inf: plain squared error.

    Returns:
        [B, T] token losses.
    """
    check_shapes(values, old_values, returns)
    clipped = values.clamp(old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def check_shapes(*tables: Tensor) -> None:
    """Check that all tables are [B, T] with the same shape.

    Raises:
        ValueError: if they are not.
    """
    shapes = {tuple(t.shape) for t in tables}
    if len(shapes) != 1 or tables[0].ndim != 2:
        raise ValueError(f"token losses take [B, T] tensors of one shape, got {sorted(shapes)}")
