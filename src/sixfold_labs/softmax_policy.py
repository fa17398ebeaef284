"""Softmax policy over a few actions, and its policy gradient."""

from __future__ import annotations

import math


def softmax(logits: list[float]) -> list[float]:
    """Probabilities of the logits."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def score(probabilities: list[float], action: int) -> list[float]:
    """Gradient of log pi(action) with respect to the logits: 1[i = action] - pi_i."""
    return [float(i == action) - p for i, p in enumerate(probabilities)]


def reinforce(logits: list[float], policy: list[float], action: int, step: float) -> list[float]:
    """Logits after one step of REINFORCE (Williams, 1992): theta + step * grad log pi(action).

    Args:
        policy: their probabilities.
        step: learning rate times reward.
    """
    return [theta + step * g for theta, g in zip(logits, score(policy, action), strict=True)]
