"""Proposer that looks up n-grams in the sequence itself (prompt lookup decoding).

It finds the longest n-gram at the end of the sequence that occurred earlier in it, and proposes the
tokens that followed the last occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from weakref import WeakKeyDictionary

from .proposer import Proposals
from .scheduler import ScheduledStep
from .sequence import Request, Sequence


class NGramIndex:
    """Position after the last occurrence of each n-gram in a token list. Extended as the list
    grows.

    Args:
        start: only n-grams that end after this many tokens are indexed.
    """

    def __init__(self, sizes: range, start: int) -> None:
        self._sizes = sizes
        self._indexed = start
        self.after: dict[tuple[int, ...], int] = {}
        """Position after the last occurrence of each n-gram."""

    def extend(self, tokens: list[int], stop: int) -> None:
        """Index the n-grams that end within the first `stop` tokens. Indexed ones cost nothing."""
        for end in range(self._indexed + 1, stop + 1):
            for n in self._sizes:
                if n <= end:
                    self.after[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, stop)


class NGramProposer:
    """Proposes tokens from n-grams of `shortest` to `longest` tokens.

    For each n, the completion is searched first, then the prompt. All samples of a prompt share its
    index.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # Weak keys: an index is freed with its request or sequence.
        self._prompts: WeakKeyDictionary[Request, NGramIndex] = WeakKeyDictionary()
        self._completions: WeakKeyDictionary[Sequence, NGramIndex] = WeakKeyDictionary()

    def follow(self, work: ScheduledStep) -> None:
        """Does nothing: the proposer reads tokens, not the KV cache."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Propose tokens. A sequence whose end does not occur earlier gets none."""
        return Proposals(
            [
                self._continue(s, count) if count else []
                for s, count in zip(sequences, counts, strict=True)
            ]
        )

    def release_memory(self) -> None:
        """Does nothing: the proposer holds no tensors."""

    def _continue(self, sequence: Sequence, count: int) -> list[int]:
        tokens, prompt = sequence.tokens, len(sequence.request.prompt)
        ours = self._completions.setdefault(sequence, NGramIndex(self._sizes, prompt - 1))
        shared = self._prompts.setdefault(sequence.request, NGramIndex(self._sizes, 0))
        # Leave out the newest token: otherwise the end of the sequence would match itself.
        ours.extend(tokens, sequence.length - 1)
        shared.extend(tokens, prompt - 1)
        for n in self._sizes:
            for index in (ours, shared):
                at = index.after.get(tuple(tokens[-n:]))
                if at is not None:
                    # Repeat from `at` if fewer than `count` tokens follow the occurrence.
                    return [tokens[at + i % (len(tokens) - at)] for i in range(count)]
        return []
