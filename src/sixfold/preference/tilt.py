"""The exact optimum of a KL-regularised objective over a few completions."""

from __future__ import annotations

from torch import Tensor


def tilted(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Log-probs of the maximiser of E[reward] - beta KL(pi || reference): the Gibbs tilt.

    pi(y) = reference(y) exp(reward(y) / beta) / Z (arXiv:2305.18290 eq. 4).

    Args:
        reference: [..., K] log-probs of all K completions under the reference.
        rewards: [..., K] their rewards.
        beta: weight of the KL.
    """
    return (reference + rewards / beta).log_softmax(-1)
