"""Token losses: pure functions on [B, T], per-token values out. Nothing here averages: the weights do (`aggregation.py`).

logp: log-probs under the policy being trained (the only table that gets a gradient); old_logp: under the policy before the update; advantages:
constants. There is no mask here: callers hand in tables already cleaned under it (zeros where nothing was sampled), because NaN there would
reach the gradient as NaN * 0. Losses that read a whole row take the mask: `sequence_losses.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# One token far off the policy would otherwise make the whole step's gradient inf or NaN. Past it the ratio is constant: no gradient.
LARGEST_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """A loss and what its clip did, [B, T] each; only the loss carries a gradient.

    ratio: what the loss weighs or clips. outside: ratio out of the band. active: the clip removed the gradient.
    """

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    active: Tensor


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: its gradient is REINFORCE's (Williams 1992). logp, advantages [B, T] -> [B, T]."""
    check_shapes(logp, advantages)
    return -advantages * logp


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old_logp) (PPO, arXiv:1707.06347 eq. 7).

    The gradient vanishes in two of the six cells: A > 0 with r above the band, A < 0 with r below it. All tables [B, T].
    dual_clip c > 1 + clip_high: where A < 0 the loss is at most -c A (arXiv:1912.09729 eq. 5). delta > 1 + clip_high: the first r is min(r, delta)
    (arXiv:2505.07291 section 3.4). These are one function under two names: A < 0 with r above the cap gives no gradient either.
    Peers: verl caps at c = 3 unless told otherwise; OpenRLHF (dual clip) and TRL (delta) leave it off.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    free = ratio if delta is None else ratio.clamp(max=delta)
    objective = torch.minimum(free * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    # The objective is r A wherever the gradient flows, and a constant times A elsewhere.
    return Surrogate(-objective, ratio.detach(), (ratio != clipped).detach(), (objective != ratio * advantages).detach())


def clipped_weight(logp: Tensor, old_logp: Tensor, advantages: Tensor, cap_low: float | None, cap_high: float) -> Surrogate:
    """-sg(clip(r, 1 - cap_low, 1 + cap_high)) A log pi, sg: no gradient (CISPO, arXiv:2506.13585 eq. 4-5). All tables [B, T].

    The weight is bounded, no token loses its gradient: `active` is False everywhere. cap_low None: no lower bound, as the paper runs it.
    Peers: verl caps at 1 + epsilon_high, as here; TRL at epsilon_high itself, so its 5 (ScaleRL, arXiv:2510.13786) is cap_high = 4 here.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp).detach()
    weight = ratio.clamp(0.0 if cap_low is None else 1.0 - cap_low, 1.0 + cap_high)
    return Surrogate(-weight * advantages * logp, ratio, ratio != weight, torch.zeros_like(ratio, dtype=torch.bool))


def soft_gate(logp: Tensor, old_logp: Tensor, advantages: Tensor, tau: float, tau_negative: float) -> Surrogate:
    """-(4 / t) sigmoid(t (r - 1)) A, t = tau where A > 0 else tau_negative (SAPO, arXiv:2511.20347 eq. 5-6). All tables [B, T].

    The gradient is that of r A times 4 p (1 - p), p the sigmoid: 1 at r = 1, fading on both sides. No band: `outside`, `active` are False.
    At r = 1 the loss is -2 A / t, not -A: the offset has no gradient.
    """
    check_shapes(logp, old_logp, advantages)
    ratio = exp_clamped(logp - old_logp)
    temperature = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau)
    gate = 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-gate * advantages, ratio.detach(), nowhere, nowhere)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), the critic's loss of PPO2 (OpenAI Baselines). All tables [B, T] -> [B, T].

    The larger of the two: a value outside the band learns only where the clip would flatter it. clip inf: the plain squared error.
    Peers: verl and OpenRLHF compute the same, with clip 0.5.
    """
    check_shapes(values, old_values, returns)
    clipped = values.clamp(old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio held within +-20."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def check_shapes(*tables: Tensor) -> None:
    """Raises ValueError unless all tables are [B, T] of one shape."""
    shapes = {tuple(t.shape) for t in tables}
    if len(shapes) != 1 or tables[0].ndim != 2:
        raise ValueError(f"token losses take [B, T] tensors of one shape, got {sorted(shapes)}")
