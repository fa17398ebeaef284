"""Advantages and token losses by name, each bound to the settings that it reads.

The functions themselves, pure and on plain tensors, are in `advantages.py`, `returns.py`,
`losses.py`, `sequence_losses.py` and `distillation.py`. A new advantage or loss needs one line here
and one in `method.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import Batch, filled, send
from . import advantages as adv
from . import returns as ret
from . import shaping
from .distillation import per_token_advantage
from .losses import Surrogate, clipped_surrogate, clipped_weight, policy_gradient, soft_gate
from .method import PASS_AT_K, Method
from .sequence_losses import (
    geometric_surrogate,
    length_scaled_sequence_surrogate,
    mirror_descent,
    power_weight,
    sequence_surrogate,
    sequence_token_surrogate,
)

EPS = 1e-6
"""Added to every standard deviation of rewards."""

COSINE = (2.0, 1.0, -10.0, 0.0, -10.0)
"""Values of the cosine length reward in its paper: right short and long, wrong short and long, and
from the longest completion on.
"""


class Step(NamedTuple):
    """Inputs of an advantage function.

    Attributes:
        rewards: [B, T], shaped, with any KL subtracted.
        part_weights: weight of each named reward in the sum; 1 for a name that is missing.
    """

    batch: Batch
    rewards: Tensor
    method: Method
    part_weights: Mapping[str, float]

    @property
    def scores(self) -> Tensor:
        """[B] sum of each row's rewards."""
        return self.rewards.sum(-1)

    @property
    def lengths(self) -> Tensor:
        """[B] number of sampled tokens."""
        return self.batch.mask.sum(-1)

    @property
    def values(self) -> Tensor:
        """[B, T] values of the critic at collection."""
        return filled(self.batch.values, "values")


class Terms(NamedTuple):
    """Inputs of a token loss, [B, T] each, zero where nothing was sampled."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor


def _no_baseline(s: Step) -> Tensor:
    return torch.where(s.scores.isfinite(), s.scores, 0.0)


def _normalise_then_sum(s: Step) -> Tensor:
    parts = torch.where(s.scores.isfinite()[:, None], filled(s.batch.parts, "parts"), torch.nan)
    weights = torch.tensor([s.part_weights.get(name, 1.0) for name in s.batch.part_names])
    return adv.normalise_then_sum(parts, send(weights, parts.device), s.batch.group, EPS)


def _greedy_baseline(s: Step) -> Tensor:
    return adv.greedy_baseline(s.scores, filled(s.batch.greedy, "greedy").to(s.scores.dtype))


def _process(s: Step) -> Tensor:
    return ret.process_returns(
        s.rewards, filled(s.batch.step_ends, "step_ends"), s.batch.group, s.batch.mask, EPS
    )


def _whitened_return(s: Step) -> Tensor:
    return ret.whiten(ret.rewards_to_go(s.rewards, s.batch.mask, s.method.gamma), known(s))


def _whitened_group_mean(s: Step) -> Tensor:
    return ret.whiten(adv.group_mean(s.scores, s.batch.group)[:, None] * s.batch.mask, known(s))


def _teacher(s: Step) -> Tensor:
    return per_token_advantage(
        old_policy(s.batch, s.method), filled(s.batch.ref_logp, "ref_logp"), s.batch.mask
    )


def known(s: Step) -> Tensor:
    """[B, T] True for sampled tokens of rows whose checker answered."""
    return s.batch.mask & s.scores.isfinite()[:, None]


def shaped_scores(batch: Batch, method: Method, horizon: int) -> Tensor:
    """Rewards with the method's length rewards added. A failed check stays NaN.

    Args:
        horizon: largest number of sampled tokens that the run allows.

    Returns:
        [B].
    """
    m, shaped = method, batch.scores
    lengths = batch.mask.sum(-1)
    if m.length_penalty == "cosine":
        shaped = shaping.cosine_length_reward(lengths, shaped > 0, horizon, *COSINE).to(
            shaped.dtype
        )
    if m.length_penalty == "kimi":
        # A failed check's length must not count in its group.
        apart = torch.where(shaped.isfinite(), batch.group, batch.group.max() + 1)
        shaped = shaped + shaping.kimi_length_reward(lengths, shaped > 0, apart)
    if m.length_penalty == "stop-properly":
        stopped = shaping.stop_properly(shaped, filled(batch.truncated, "truncated"), 0.0)
        # Where wrong answers cost, being cut off must not pay.
        shaped = torch.minimum(shaped, stopped)
    if m.overlong_buffer:
        buffer = max(1, round(m.overlong_buffer * horizon))
        cut_off = filled(batch.truncated, "truncated") if m.overlong_truncated_only else None
        shaped = shaped + shaping.overlong_penalty(
            lengths, horizon, buffer, m.overlong_penalty, cut_off
        )
    return torch.where(batch.scores.isfinite(), shaped, batch.scores)


ADVANTAGES: dict[str, Callable[[Step], Tensor]] = {
    "no_baseline": _no_baseline,
    "group_mean": lambda s: adv.group_mean(s.scores, s.batch.group),
    "group_zscore": lambda s: adv.group_zscore(s.scores, s.batch.group, EPS),
    "leave_one_out": lambda s: adv.leave_one_out(s.scores, s.batch.group),
    "batch_std": lambda s: adv.batch_std(s.scores, s.batch.group, EPS),
    "length_weighted": lambda s: adv.length_weighted(s.scores, s.batch.group, s.lengths),
    "maxrl": lambda s: adv.maxrl(s.scores, s.batch.group),
    "gpg": lambda s: adv.gpg(s.scores, s.batch.group),
    "pass_at_k": lambda s: adv.pass_at_k(s.scores, s.batch.group, PASS_AT_K),
    "top_gap": lambda s: adv.top_gap(s.scores, s.batch.group),
    "normalise_then_sum": _normalise_then_sum,
    "greedy_baseline": _greedy_baseline,
    "process": _process,
    "whitened_return": _whitened_return,
    "whitened_group_mean": _whitened_group_mean,
    "teacher": _teacher,
}
"""Advantages by name. They are [B], spread over each row's sampled tokens, or [B, T]."""

CRITICS: dict[str, Callable[[Step], tuple[Tensor, Tensor]]] = {
    "gae": lambda s: ret.gae(s.rewards, s.values, s.batch.mask, s.method.gamma, s.method.lam),
    "vtrace": lambda s: ret.vtrace(
        s.rewards, s.values, log_rho(s.batch), s.batch.mask, s.method.gamma, s.method.lam, 1.0, 1.0
    ),
}
"""Advantages from a critic, by name: (advantages, returns), [B, T] each."""

LOSSES: dict[str, Callable[[Terms, Method], Surrogate]] = {
    "policy_gradient": lambda t, m: _without_clipping(policy_gradient(t.logp, t.advantages)),
    "clipped_surrogate": lambda t, m: clipped_surrogate(
        *t[:3], *_clip(m), dual_clip=m.dual_clip or None
    ),
    "sequence_surrogate": lambda t, m: sequence_surrogate(*t, *_clip(m)),
    "sequence_token_surrogate": lambda t, m: sequence_token_surrogate(*t, *_clip(m)),
    "length_scaled_sequence_surrogate": lambda t, m: length_scaled_sequence_surrogate(
        *t, *_clip(m)
    ),
    "clipped_weight": lambda t, m: clipped_weight(*t[:3], m.clip_low, _clip_high(m)),
    "soft_gate": lambda t, m: soft_gate(*t[:3], m.tau or 1.0, m.tau_negative or 1.05),
    "geometric_surrogate": lambda t, m: geometric_surrogate(*t, *_clip(m)),
    "power_weight": lambda t, m: power_weight(*t, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0),
    "mirror_descent": lambda t, m: mirror_descent(*t, m.tau or 0.1),
}
"""Token losses by name."""


def _without_clipping(loss: Tensor) -> Surrogate:
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return Surrogate(loss, torch.ones_like(loss), nowhere, nowhere)


def _clip(method: Method) -> tuple[float, float]:
    if method.clip_low is None:
        raise ValueError(f"{method.loss} needs clip_low")
    return method.clip_low, _clip_high(method)


def _clip_high(method: Method) -> float:
    if method.clip_high is None:
        raise ValueError(f"{method.loss} needs clip_high")
    return method.clip_high


def old_policy(batch: Batch, method: Method) -> Tensor:
    """Log-probs of the policy in the denominator of ratios, [B, T].

    It is the sampler, or the trainer's policy at the start of the step if the gap to the sampler is
    corrected for separately.
    """
    return filled(batch.prox_logp, "prox_logp") if method.ratio_from_trainer else batch.old_logp


def log_rho(batch: Batch) -> Tensor:
    """[B, T] log-ratio of trainer to sampler at the start of the step."""
    return filled(batch.prox_logp, "prox_logp") - batch.old_logp
