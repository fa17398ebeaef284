"""Bradley-Terry preferences over four responses, shared by the labs that learn from pairs."""

from __future__ import annotations

import math
import random

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
