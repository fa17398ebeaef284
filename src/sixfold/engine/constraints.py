"""Constrained decoding: tokens that a grammar does not allow get no probability.

The engine knows no grammar. Whoever asks brings a `Constraint`, which says for any completion so far
what may follow. So the sampled distribution is a function of the row's logits, parameters and tokens,
as it is without a constraint, and the recorded log-prob is that of the constrained distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .sequence import Constraint, Matcher
from .sequence import Sequence as EngineSequence


class Constraints:
    """The matchers of the sequences that run under a constraint."""

    def __init__(self) -> None:
        self._matchers: WeakKeyDictionary[EngineSequence, Matcher] = WeakKeyDictionary()

    def apply(self, logits: Tensor, rows: Iterable[tuple[int, EngineSequence, list[int]]]) -> Tensor:
        """Logits with -inf for tokens that may not follow.

        Args:
            logits: [B, V] float32.
            rows: row number, sequence and completion so far, of each row that is constrained.

        Returns:
            [B, V]; a copy if any row is constrained.
        """
        found = [(row, self._matcher(sequence).allowed(completion)) for row, sequence, completion in rows]
        if not found:
            return logits
        allowed = torch.zeros(len(found), logits.shape[-1], dtype=torch.bool)
        for line, (_, mask) in zip(allowed, found, strict=True):
            line[: len(mask)] = mask[: len(line)]
        at = torch.tensor([row for row, _ in found], device=logits.device)
        return logits.index_copy(0, at, logits[at].masked_fill(~allowed.to(logits.device), -torch.inf))

    def _matcher(self, sequence: EngineSequence) -> Matcher:
        if sequence not in self._matchers:
            constraint: Constraint | None = sequence.request.constraint
            assert constraint is not None
            self._matchers[sequence] = constraint.start()
        return self._matchers[sequence]


def constrained_rows(sequences: Sequence[EngineSequence]) -> list[tuple[int, EngineSequence]]:
    """Row number and sequence of those that run under a constraint."""
    return [(row, s) for row, s in enumerate(sequences) if s.request.constraint is not None]
