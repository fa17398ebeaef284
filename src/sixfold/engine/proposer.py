"""Contract of a proposer, which proposes the next tokens so that one forward pass can check
several.

Every proposer promises that its token for a position depends only on the tokens before it and on
the sampling noise. It must not depend on how many tokens were requested, on the batch, or on
whether earlier proposals were accepted. So the sampled tokens do not depend on where a step ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .scheduler import ScheduledStep
from .sequence import Sequence


@dataclass(frozen=True)
class Draft:
    """Tokens drawn by a draft model, and the distributions that they were drawn from.

    Each sequence has one row per proposed token and one extra row after them: N rows in total.

    Attributes:
        tokens: [N] drawn tokens.
        logp: [N, V] float32 log-probs.
    """

    tokens: Tensor
    logp: Tensor


@dataclass(frozen=True)
class Proposals:
    """Proposed tokens.

    Attributes:
        tokens: proposed tokens of each sequence, at most as many as requested.
        draft: the draft model's draws; None for a proposer without probabilities.
    """

    tokens: list[list[int]]
    draft: Draft | None = None


class Proposer(Protocol):
    """Proposes tokens. The module docstring states what an implementation promises."""

    def follow(self, work: ScheduledStep) -> None:
        """Follow the prompts and preempted sequences that the model computes in this step."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Propose at most counts[i] next tokens for sequence i, whose blocks have room for them."""

    def release_memory(self) -> None:
        """Free memory that the next step can rebuild."""


def tokens_seen(sequence: Sequence, guess: list[int]) -> list[int]:
    """Tokens that the penalties count after the proposed tokens `guess`.

    Without penalties `guess` is left out, to save the copy.
    """
    return sequence.tokens + guess if sequence.request.params.reads_history else sequence.tokens
