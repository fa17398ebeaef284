"""Constrained decoding: tokens that a constraint does not allow get probability 0.

The engine contains no grammars. A request brings a `Constraint`, which returns the allowed tokens
for any completion so far. The sampled distribution still depends only on the row's logits,
parameters and tokens. The recorded log-prob is that of the constrained distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .sequence import Constraint, Matcher
from .sequence import Sequence as EngineSequence


class Constraints:
    """Matchers of the sequences that have a constraint."""

    def __init__(self) -> None:
        self._matchers: WeakKeyDictionary[EngineSequence, Matcher] = WeakKeyDictionary()

    def apply(
        self, logits: Tensor, rows: Iterable[tuple[int, EngineSequence, list[int]]]
    ) -> Tensor:
        """Set the logits of tokens that are not allowed to -inf.

        Args:
            logits: [B, V] float32.
            rows: row number, sequence and completion so far of each constrained row.

        Returns:
            [B, V]; a copy if any row is constrained.
        """
        found = [
            (row, self._matcher(sequence).allowed(completion)) for row, sequence, completion in rows
        ]
        if not found:
            return logits
        allowed = torch.zeros(len(found), logits.shape[-1], dtype=torch.bool)
        for line, (_, mask) in zip(allowed, found, strict=True):
            line[: len(mask)] = mask[: len(line)]
        at = torch.tensor([row for row, _ in found], device=logits.device)
        return logits.index_copy(
            0, at, logits[at].masked_fill(~allowed.to(logits.device), -torch.inf)
        )

    def _matcher(self, sequence: EngineSequence) -> Matcher:
        if sequence not in self._matchers:
            constraint: Constraint | None = sequence.request.constraint
            assert constraint is not None
            self._matchers[sequence] = constraint.start()
        return self._matchers[sequence]


def constrained_rows(sequences: Sequence[EngineSequence]) -> list[tuple[int, EngineSequence]]:
    """Row number and sequence of each sequence with a constraint."""
    return [(row, s) for row, s in enumerate(sequences) if s.request.constraint is not None]
