"""Acceptance of proposed tokens in speculative decoding.

Acceptance is exact: whatever was proposed, each token has the distribution that the model alone
would sample from.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .proposer import Draft
from .sampler import inverse_transform


def reject(
    logp: Tensor, draft: Draft, greedy: Tensor, accept_noise: Tensor, residual_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative rejection sampling.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise a token is
    drawn from max(p - q, 0), renormalised. The result has distribution p. Leviathan et al. 2023
    (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).

    Args:
        logp: [N, V] log-probs of p.
        draft: proposed tokens [N] and log-probs of q [N, V].
        greedy: [N] bool, True where p puts all probability on its best token.
        accept_noise: [N] float64 in [0, 1).
        residual_noise: [N] float64 in [0, 1). Both noises are independent of one another and of
            the draft's draw.

    Returns:
        Tokens [N], and whether the proposed token was accepted [N].
    """
    guess = draft.tokens[:, None]
    p, q = (side.gather(-1, guess)[:, 0].double().exp() for side in (logp, draft.logp))
    best = logp.argmax(-1)
    accepted = torch.where(greedy, draft.tokens == best, accept_noise * q < p)
    tokens = draft.tokens.clone()
    at = (~accepted).nonzero()[:, 0]
    target = logp[at].double().exp()
    residual = (target - draft.logp[at].double().exp()).clamp_min(0.0)
    # If p and q are equal up to rounding, the residual sums to 0 and cannot be sampled: use p.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    tokens[at] = torch.where(greedy[at], best[at], inverse_transform(residual, residual_noise[at]))
    return tokens, accepted


def run_lengths(accepted: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Number of tokens that each sequence gains: its accepted tokens, plus the one after them.

    Args:
        accepted: [N] bool, whether each row's proposed token is accepted; sequence after sequence.
        rows: [B] number of rows of each sequence, at least 1.

    Returns:
        [B] token counts.
    """
    ends = np.cumsum(rows)
    rejected = ~accepted
    rejected[ends - 1] = True
    at = np.flatnonzero(rejected)
    starts = ends - rows
    return at[np.searchsorted(at, starts)] - starts + 1
