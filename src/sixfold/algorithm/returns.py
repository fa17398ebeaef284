"""Returns and advantages along a row. Pure functions on [B, T].

Index t refers to token t: its reward, and the value of the state before it. A token that the policy
did not sample (mask False: prompt, tool output, padding) is skipped. The next sampled token follows
the previous one directly, at one factor of gamma and lam. Values off the mask are never read. A row
with a reward that is not finite on a sampled token (its check failed) gets advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .advantages import group_zscore

WHITEN_EPS = 1e-8
"""Added to the variance that `whiten` divides by."""


def known_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """The mask without rows whose checker failed; [B, T] bool.

    Those rows have a reward that is not finite on a sampled token. Use this mask for `whiten`: the
    zeros of a failed row would pull the mean.
    """
    _check(mask, rewards)
    return mask & torch.where(mask, rewards, 0.0).isfinite().all(-1, keepdim=True)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_(t+1). REINFORCE (Williams 1992).

    With the KL in the rewards and `whiten`, this is REINFORCE++ (arXiv:2501.03262). Tokens that
    were not sampled are skipped: a turn before a tool call also sees the final reward.

    Args:
        rewards: [B, T].
        mask: [B, T] bool, True for sampled tokens.
        gamma: discount.

    Returns:
        [B, T].
    """
    scored = known_tokens(rewards, mask)
    return _sum_from(torch.where(scored, rewards, 0.0), torch.full_like(rewards, gamma), scored)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16; arXiv:1707.06347, eq. 11).

    delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1), returns = A + V

    lam 0 is the TD error, lam 1 the Monte Carlo return minus V. V is 0 after the last token.
    Returns are those of the raw advantages: whiten afterwards (verl does so inside). The returns of
    a row whose checker failed are its values.

    Args:
        rewards: [B, T].
        values: [B, T] V of the state before each token.
        mask: [B, T] bool, True for sampled tokens.
        gamma: discount.
        lam: GAE lambda.

    Returns:
        (advantages, returns), each [B, T].
    """
    _check(mask, rewards, values)
    scored = known_tokens(rewards, mask)
    delta = _td_error(rewards, values, scored, gamma)
    advantages = _sum_from(delta, torch.full_like(delta, gamma * lam), scored)
    return advantages, torch.where(mask, advantages + values, 0.0)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_rho: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """V-trace: GAE for tokens that another policy sampled (arXiv:1802.01561).

    Espeholt et al. 2018. With rho_t = min(rho_bar, e^log_rho), c_t = lam min(c_bar, e^log_rho),
    c_bar <= rho_bar, and delta as in `gae`:

        returns v_t = V_t + x_t,  x_t = rho_t delta_t + gamma c_t x_(t+1)      (eq. 1)
        A_t = rho_t (delta_t + gamma lam x_(t+1))                             (section 4.2)

    At lam 1, A_t = rho_t (r_t + gamma v_(t+1) - V_t). A contains its importance weight: do not
    weight the loss again. With log_rho 0 and bars of 1 this is `gae`.

    Args:
        rewards: [B, T].
        values: [B, T] V of the state before each token.
        log_rho: [B, T] log-prob now minus log-prob at sampling.
        mask: [B, T] bool, True for sampled tokens.
        gamma: discount.
        lam: GAE lambda.
        rho_bar: cap of rho.
        c_bar: cap of c.

    Returns:
        (advantages, returns), each [B, T].
    """
    _check(mask, rewards, values, log_rho)
    scored = known_tokens(rewards, mask)
    ratio = torch.where(scored, log_rho, 0.0).clamp(-20.0, 20.0).exp()
    rho, c = ratio.clamp_max(rho_bar), lam * ratio.clamp_max(c_bar)
    delta = _td_error(rewards, values, scored, gamma)
    x = _sum_from(rho * delta, gamma * c, scored)
    advantages = torch.where(scored, rho * (delta + gamma * lam * _following(x, scored)), 0.0)
    return advantages, torch.where(mask, values + x, 0.0)


def whiten(table: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all tokens of the mask, with population variance.

    If all tokens are equal the result is exactly 0. Long rows weigh more, so the mean over tokens
    is 0 and the mean over rows is not. verl uses the n - 1 form; OpenRLHF uses this form with var
    clamped at 1e-8.

    Args:
        table: [B, T].
        mask: [B, T] bool, True for the tokens to whiten.

    Returns:
        [B, T], 0 off the mask.
    """
    _check(mask, table)
    count = mask.sum().clamp_min(1)
    mean = torch.where(mask, table, 0.0).sum() / count
    centred = torch.where(mask, table - mean, 0.0)
    # Equal floats can leave a rounding residue: 1 / sqrt(WHITEN_EPS) would amplify it 10,000 times.
    flat = torch.where(mask, table, -torch.inf).max() <= torch.where(mask, table, torch.inf).min()
    return torch.where(flat, 0.0, centred * (centred.square().sum() / count + WHITEN_EPS).rsqrt())


def process_returns(
    step_rewards: Tensor, step_mask: Tensor, group: Tensor, mask: Tensor, eps: float
) -> Tensor:
    """A_t = sum of the normalised rewards of the steps that end at t or later; [B, T].

    GRPO with process rewards (arXiv:2402.03300, 4.1.3). All step rewards of a group are normalised
    together, with population std.

    Args:
        step_rewards: [B, T] reward of a step, on its last token.
        step_mask: [B, T] bool, True at the last token of a step.
        group: [B] number of each row's group.
        mask: [B, T] bool, tokens that get an advantage.
        eps: added to the standard deviation.
    """
    _check(mask, step_rewards, step_mask)
    if group.shape != mask.shape[:1]:
        raise ValueError(f"group must be [B] with B = {mask.shape[0]}, got {tuple(group.shape)}")
    known = known_tokens(step_rewards, step_mask)
    rewards = torch.where(known, step_rewards, torch.nan)
    normalised = group_zscore(
        rewards.flatten(), group[:, None].expand_as(rewards).flatten(), eps
    ).view_as(rewards)
    return torch.where(mask, normalised.flip(-1).cumsum(-1).flip(-1), 0.0)


def _td_error(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[B, T]: r_t + gamma V_(t+1) - V_t, 0 off the mask."""
    return torch.where(mask, rewards + gamma * _following(values, mask) - values, 0.0)


def _following(table: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the table at the next token of the mask after t, 0 if there is none."""
    width = mask.shape[1]
    own = torch.where(mask, torch.arange(width, device=mask.device), width)
    from_here_on = own.flip(-1).cummin(-1).values.flip(-1)
    return pad(table, (0, 1)).gather(1, pad(from_here_on, (0, 1), value=width)[:, 1:])


def _sum_from(terms: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: y_t = terms_t + decay_t y_(next token of the mask), 0 off the mask.

    Values of `terms` and `decay` off the mask are not read.
    """
    return (
        sum_by_columns(terms, decay, mask) if terms.is_cpu else sum_by_doubling(terms, decay, mask)
    )


def sum_by_columns(terms: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """`_sum_from` by definition, from the last column to the first.

    On a GPU each column would cost three kernels.
    """
    total = terms.new_zeros(len(terms))
    sums = []
    for t in reversed(range(terms.shape[1])):
        total = torch.where(mask[:, t], terms[:, t] + decay[:, t] * total, total)
        sums.append(total)
    return torch.where(mask, torch.stack(sums[::-1], -1), 0.0)


def sum_by_doubling(terms: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """`_sum_from` in log2(T) rounds.

    Column t holds y_t as value + factor * y_(t+n), and each round doubles n. It runs in float64, so
    the result is at least as close to the exact sum as `sum_by_columns` in float32.
    """
    value, factor = torch.where(mask, terms, 0.0).double(), torch.where(mask, decay, 1.0).double()
    reach = 1
    while reach < terms.shape[1]:
        ahead = pad(value[:, reach:], (0, reach))
        # A product of many factors above 1 may overflow, and infinity times 0 is NaN.
        value = value + torch.where(ahead == 0, 0.0, factor * ahead)
        factor = factor * pad(factor[:, reach:], (0, reach))
        reach *= 2
    return torch.where(mask, value, 0.0).to(terms.dtype)


def _check(mask: Tensor, *tables: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (mask, *tables)]
    if mask.ndim != 2 or len(set(shapes)) != 1:
        raise ValueError(f"returns take [B, T] tensors of one shape, got {shapes}")
