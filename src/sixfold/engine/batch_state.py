"""State of a batch of sequences, stored as columns.

Per-sequence values that every step needs are gathered once and kept while the same sequences run.
With hundreds of sequences, reading them from each sequence would take a tenth of a step's time,
most of it waiting for memory.
"""

from __future__ import annotations

import time
from itertools import zip_longest

import numpy as np

from .constraints import constrained_rows
from .sampling_batch import SamplingBatch
from .sequence import Sequence

NOISE_AHEAD = 16
"""Tokens per sequence for which noise is gathered at once, after a batch's first step."""


class BatchState:
    """A batch of B sequences. No other code may append tokens to them while the batch is in use.

    Attributes:
        tokens: the sequences' own token lists, not copies.
        newest: [B] newest token of each sequence.
        lengths: [B] number of tokens of each sequence, including the prompt.
        owners: adapter of each row (`adapters.Owners`); empty if no row has one.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.params = SamplingBatch(s.request.params for s in sequences)
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
        """Row, sequence and completion so far of each sequence with a constraint."""
        return [(row, s, s.tokens[len(s.request.prompt) :]) for row, s in self._constrained]

    def noise(self) -> np.ndarray:
        """Sampling noise [B] for the next token of each sequence."""
        if self._at == len(self._noise):
            ahead = [
                s.noise[len(logps) : len(logps) + self._ahead]
                for s, logps in zip(self.sequences, self._logps, strict=True)
            ]
            # Sequences near their limit have less noise left: fill up with 0, which is never used.
            self._noise = np.array([*zip_longest(*ahead, fillvalue=0.0)])
            self._at, self._ahead = 0, NOISE_AHEAD
        return self._noise[self._at]  # type: ignore[no-any-return]

    def advance(self, tokens: list[int], logps: list[float], versions: list[int]) -> list[Sequence]:
        """Append one token to each sequence.

        Args:
            tokens: [B] sampled tokens.
            logps: [B] their log-probs.
            versions: [B] weight versions that sampled them.

        Returns:
            The sequences that ended with this token.
        """
        # any(map(append)) loops in C. append returns None, so any() never stops early.
        any(map(list.append, self.tokens, tokens))
        any(map(list.append, self._logps, logps))
        any(map(list.append, self._versions, versions))
        self.newest = np.array(tokens, dtype=np.int64)
        self.lengths += 1
        self._left, self._at = self._left - 1, self._at + 1
        return (
            [] if self._left > 0 and self._stops.isdisjoint(tokens) else self._end_sequences(tokens)
        )

    def _end_sequences(self, tokens: list[int]) -> list[Sequence]:
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
