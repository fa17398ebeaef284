"""Bradley-Terry preferences over four responses, shared by the labs that learn from pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from .controls import LIBRARY, source_control

PREFERENCE_SOURCE = source_control(
    "this lab's arithmetic", "the losses of sixfold.preference that train"
)

RESPONSES = ("A", "B", "C", "D")
TRUE_SCORES = (0.0, 1.0, 2.0, 2.5)
"""Score of each response. C and D are close, so a pair of them is often labelled wrong."""


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def softplus(x: float) -> float:
    """log(1 + exp(x)) = -log sigmoid(-x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


Logistic = Callable[[float], tuple[float, float]]
"""Margin -> (loss, weight of the pair): -log sigmoid(margin) and sigmoid(-margin)."""


def logistic(source: str) -> Logistic:
    """The loss of Bradley and Terry, by this module or by the library.

    Args:
        source: "formula", or "library" for the DPO loss of sixfold.preference and its gradient.
    """
    if source != LIBRARY:
        return lambda margin: (softplus(-margin), sigmoid(-margin))
    return lambda margin: library_loss("dpo", 1.0, margin)


def library_loss(name: str, beta: float, margin: float) -> tuple[float, float]:
    """Loss of a pair and minus its gradient in the margin, by a loss of sixfold.preference.

    Args:
        margin: log-ratio of the better completion minus that of the worse one.
    """
    import torch

    from sixfold.preference.loss import Settings
    from sixfold.preference.pairs import Pairs, Statistics
    from sixfold.preference.zoo import LOSSES

    chosen = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    one, zero = torch.ones_like(chosen).detach(), torch.zeros_like(chosen).detach()
    row = LOSSES[name]
    loss = row.per_pair(Pairs(chosen, zero, one, one), Settings(beta=beta), Statistics())
    (gradient,) = torch.autograd.grad(loss, chosen)
    return loss.item(), -gradient.item()


def labelled_pair(draw: random.Random) -> tuple[int, int]:
    """Two different responses with a preference sampled from TRUE_SCORES.

    Bradley and Terry (1952): P(i preferred to j) = sigmoid(score_i - score_j).

    Returns:
        (winner, loser): indices into RESPONSES.
    """
    first, second = draw.sample(range(len(TRUE_SCORES)), 2)
    if draw.random() < sigmoid(TRUE_SCORES[first] - TRUE_SCORES[second]):
        return first, second
    return second, first
