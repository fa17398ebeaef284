"""Sequences that go further together, as columns: what every step asks of each of them is gathered once, and kept for as long as the same ones run.
With hundreds of sequences a step that asks each of them in turn spends a tenth of its time on it, most of that waiting for memory.
"""

from __future__ import annotations

import time
from itertools import zip_longest

import numpy as np

from .asked import Asked
from .constraints import constrained_rows
from .sequence import Sequence

NOISE_AHEAD = 16
"""Tokens for which noise is gathered at a time, once a batch has stayed the same for a step."""


class Columns:
    """A batch of B sequences; nothing else makes them longer while it is in use.

    params, tokens: of each; tokens are the sequences' own lists. newest, lengths: [B], the last token and how many there are. owners: whose adapter
    each row wants (`adapters.Owners`), empty if none does.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.params = Asked(s.request.params for s in sequences)
        self.tokens = [s.tokens for s in sequences]
        self.newest = np.array([tokens[-1] for tokens in self.tokens], dtype=np.int64)
        self.lengths = np.array([len(tokens) for tokens in self.tokens], dtype=np.int64)
        owners = [(s.request.adapter, 1) for s in sequences]
        self.owners = owners if any(adapter for adapter, _ in owners) else []
        self._constrained = constrained_rows(sequences)
        self._logps = [s.logp for s in sequences]
        self._versions = [s.version for s in sequences]
        self._stops = frozenset().union(*(s.stops for s in sequences))
        self._left = min((s.limit - len(s.tokens) for s in sequences), default=0)
        self._noise = np.empty((0, len(sequences)))
        self._at, self._ahead = 0, 1

    def __len__(self) -> int:
        return len(self.sequences)

    def constrained(self) -> list[tuple[int, Sequence, list[int]]]:
        """Row, sequence and completion so far, of those that run under a constraint."""
        return [(row, s, s.tokens[len(s.request.prompt) :]) for row, s in self._constrained]

    def noise(self) -> np.ndarray:
        """[B], of the tokens to be drawn next."""
        if self._at == len(self._noise):
            ahead = [s.noise[len(logps) : len(logps) + self._ahead] for s, logps in zip(self.sequences, self._logps, strict=True)]
            self._noise = np.array([*zip_longest(*ahead, fillvalue=0.0)])  # some end before that
            self._at, self._ahead = 0, NOISE_AHEAD
        return self._noise[self._at]  # type: ignore[no-any-return]

    def advance(self, tokens: list[int], logps: list[float], versions: list[int]) -> list[Sequence]:
        """Each goes further by its token -> those that ended with it."""
        # Loops without Python: append returns None, so any() goes through all.
        any(map(list.append, self.tokens, tokens))
        any(map(list.append, self._logps, logps))
        any(map(list.append, self._versions, versions))
        self.newest = np.array(tokens, dtype=np.int64)
        self.lengths += 1
        self._left, self._at = self._left - 1, self._at + 1
        return [] if self._left > 0 and self._stops.isdisjoint(tokens) else self._ended(tokens)

    def _ended(self, tokens: list[int]) -> list[Sequence]:
        ended = []
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if token in sequence.stops:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                sequence.finish_reason = "length"
            else:
                continue
            sequence.seconds = time.perf_counter() - sequence.started
            ended.append(sequence)
        return ended
