"""Proposes what followed the last time (prompt lookup): the longest n-gram that ends the text and stood in it before says how the text goes on."""

from __future__ import annotations

from collections.abc import Sequence as Many
from weakref import WeakKeyDictionary

from .proposer import Proposals
from .scheduler import Work
from .sequence import Request, Sequence


class NGramIndex:
    """Where each n-gram of a text last ended, for n in `sizes`: of those that end at `start` or later. Grows with the text."""

    def __init__(self, sizes: range, start: int) -> None:
        self._sizes = sizes
        self._indexed = start
        self.after: dict[tuple[int, ...], int] = {}
        """Of each n-gram, the position behind its last occurrence."""

    def extend(self, tokens: list[int], stop: int) -> None:
        """Take in the n-grams that end before position `stop`; those known already cost nothing."""
        for end in range(self._indexed + 1, stop + 1):
            for n in self._sizes:
                if n <= end:
                    self.after[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, stop)


class NGramProposer:
    """Looks up n-grams of `shortest` to `longest` tokens, in the completion first, then in the prompt, whose index all its samples share."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # Weak: they go with what they speak of.
        self._prompts: WeakKeyDictionary[Request, NGramIndex] = WeakKeyDictionary()
        self._completions: WeakKeyDictionary[Sequence, NGramIndex] = WeakKeyDictionary()

    def follow(self, work: Work) -> None:
        """Nothing to do: it reads tokens, not the cache."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Nothing for a sequence that ends with no n-gram of its past."""
        return Proposals([self._continue(s, count) if count else [] for s, count in zip(sequences, counts, strict=True)])

    def release_memory(self) -> None:
        """It holds no tensors."""

    def _continue(self, sequence: Sequence, count: int) -> list[int]:
        tokens, prompt = sequence.tokens, len(sequence.request.prompt)
        ours = self._completions.setdefault(sequence, NGramIndex(self._sizes, prompt - 1))
        shared = self._prompts.setdefault(sequence.request, NGramIndex(self._sizes, 0))
        # All but the newest token: the text's own end is no earlier occurrence.
        ours.extend(tokens, sequence.length - 1)
        shared.extend(tokens, prompt - 1)
        for n in self._sizes:
            for index in (ours, shared):
                at = index.after.get(tuple(tokens[-n:]))
                if at is not None:
                    return [tokens[at + i % (len(tokens) - at)] for i in range(count)]  # goes round where the two overlap
        return []
