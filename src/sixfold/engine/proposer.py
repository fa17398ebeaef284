"""The contract of a proposer: who guesses the tokens that the model will draw next, so that one forward can check several of them.

What every proposer promises: its guess for a position is a function of the tokens before it (and of the sampling noise) alone, never of how many
were asked for, of the batch or of how earlier guesses fared. So what is drawn does not depend on where a step ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .scheduler import Work
from .sequence import Sequence


@dataclass(frozen=True)
class Draft:
    """Guesses that were drawn, and what from. A row for each proposed token of each sequence and one more behind them: N rows in all.

    tokens: [N], what was drawn. logp: [N, V] float32, the distributions.
    """

    tokens: Tensor
    logp: Tensor


@dataclass(frozen=True)
class Proposals:
    """tokens: what may follow each sequence, at most as many as were asked for. draft: None of a proposer without probabilities."""

    tokens: list[list[int]]
    draft: Draft | None = None


class Proposer(Protocol):
    """See the module's docstring for what it promises."""

    def follow(self, work: Work) -> None:
        """Keep up with what the model computes of prompts and of preempted sequences in this step."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Guess what follows each sequence, at most counts[i] tokens; its blocks have room for them."""

    def release_memory(self) -> None:
        """Drop what the next step can make anew."""


def tokens_seen(sequence: Sequence, guess: list[int]) -> list[int]:
    """The tokens that penalties count behind a guess. Without penalties the guess is left out, to save the copy."""
    return sequence.tokens + guess if sequence.request.params.reads_history else sequence.tokens
