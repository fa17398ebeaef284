"""Which guessed tokens stand. Both rules are exact: whatever was guessed, each token has the distribution that the model alone would draw it from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .proposer import Draft
from .sampler import inverse_transform


def reject(logp: Tensor, draft: Draft, greedy: Tensor, accept_noise: Tensor, residual_noise: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling of a drawn guess x ~ q: it stands with probability min(1, p(x) / q(x)); otherwise a token from max(p - q, 0), renormalised.
    -> token [N], whether the guess stood [N].

    logp: [N, V], p. greedy: [N] bool, p is all on its best token. accept_noise, residual_noise: [N] float64 in [0, 1), independent of one another and
    of the draw. Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).
    """
    guess = draft.tokens[:, None]
    p, q = (side.gather(-1, guess)[:, 0].double().exp() for side in (logp, draft.logp))
    best = logp.argmax(-1)
    stands = torch.where(greedy, draft.tokens == best, accept_noise * q < p)
    tokens = draft.tokens.clone()
    at = (~stands).nonzero()[:, 0]
    target = logp[at].double().exp()
    residual = (target - draft.logp[at].double().exp()).clamp_min(0.0)
    # p and q equal to rounding leave nothing: then either is p.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    tokens[at] = torch.where(greedy[at], best[at], inverse_transform(residual, residual_noise[at]))
    return tokens, stands


def run_lengths(stands: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """stands: [N] bool, rows of the sequences one after another; rows: [B], how many each has (1 or more) -> [B] tokens that each goes further: those
    that stand, and the one behind them."""
    ends = np.cumsum(rows)
    falls = ~stands
    falls[ends - 1] = True
    at = np.flatnonzero(falls)
    starts = ends - rows
    return at[np.searchsorted(at, starts)] - starts + 1
