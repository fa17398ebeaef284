"""Losses of reward models: pure functions of scores."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log sigma(r_w - r_l - m): the chosen completion wins with probability sigma(r_w - r_l).

    Bradley and Terry 1952; with a margin m, Llama 2 (https://arxiv.org/abs/2307.09288). A constant
    that is added to all scores changes nothing.

    Args:
        chosen: [N] scores of the better completions.
        rejected: [N] scores of the worse ones.
        margin: [N] difference that is asked for, or one for all.

    Returns:
        [N] loss of each pair.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_w + r_l)^2, which holds the mean score of a pair at 0 (https://arxiv.org/abs/2312.09244).

    Args:
        chosen: [N] scores of the better completions.
        rejected: [N] scores of the worse ones.

    Returns:
        [N] penalty of each pair.
    """
    return (chosen + rejected).square()


def binary_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """-y log sigma(r) - (1 - y) log sigma(-r): the completion is right with probability sigma(r).

    Args:
        scores: [N].
        labels: [N] between 0 and 1.

    Returns:
        [N] loss of each completion.
    """
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
