"""Settings of the methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of all methods. Each reads those that it needs.

    Attributes:
        n: completions; of a beam, chains after each step; of tree search, simulations. With a
            budget it is the size of a round, and rounds follow until the budget is spent.
        expand: extensions of each kept chain per step (M). A beam keeps n / M chains.
        lookahead: steps that a chain is continued greedily before it is scored.
        explore: constant c of the upper confidence bound.
        threshold: a step with a smaller score is an error.
        think: most tokens before the end of thinking is written.
        think_min: fewest tokens of thinking.
        think_end: text that ends the thinking.
        think_more: text in place of an end of thinking that comes too early.
    """

    n: int = 16
    expand: int = 4
    lookahead: int = 1
    explore: float = 1.0
    threshold: float = 0.5
    think: int = 256
    think_min: int = 0
    think_end: str = "</think>"
    think_more: str = "Wait"
