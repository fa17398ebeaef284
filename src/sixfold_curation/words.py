"""The words of many texts as numbers on disk, so that a million prompts fit in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .text import decides, tokens

Hashes = NDArray[np.uint64]
Ids = NDArray[np.uint32]
Places = NDArray[np.int64]

DECIDES = 1
"""Bit of a word's id: the word decides what is asked (`text.decides`)."""
NUMBER = 2
"""Bit of a word's id: the word is a number."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93
_VOCABULARY = 1 << 19
_BLOCK = 1 << 14
"""Texts that are computed with at once."""


class Vocabulary:
    """Ids of words: 30 bits of a hash, and two bits that say what kind of word it is.

    Args:
        meet: called with each word and its id when the word comes up, now and then again.
    """

    def __init__(self, meet: Callable[[str, int], None] = lambda word, number: None) -> None:
        self._known: dict[str, int] = {}
        self._meet = meet

    def ids(self, words: Iterable[str]) -> list[int]:
        """One id per word. Equal words have equal ids in every process."""
        known = self._known
        if len(known) > _VOCABULARY:
            known.clear()
        found = []
        for word in words:
            number = known.get(word)
            if number is None:
                number = known[word] = _id(word)
                self._meet(word, number)
            found.append(number)
        return found


def text_hash(text: str) -> int:
    """A 64-bit hash of a text, never 0."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def _id(word: str) -> int:
    digest = int.from_bytes(blake2b(word.encode(), digest_size=4).digest(), "little")
    return digest & ~3 | NUMBER * word[0].isdigit() | DECIDES * decides(word)


class Words:
    """Word ids of texts in order, in a temporary file.

    Args:
        texts: the texts.
        folder: where the file is. None: the system's place.
        vocabulary: gives the ids.
    """

    def __init__(
        self,
        texts: Iterable[str],
        folder: Path | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        vocabulary, lengths = vocabulary or Vocabulary(), [0]
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (as long as the object)
        waiting: list[int] = []
        for text in texts:
            ids = vocabulary.ids(tokens(text) or text.split())  # signs alone differ too
            waiting += ids
            lengths.append(len(ids))
            if len(waiting) > 1 << 16:
                np.array(waiting, dtype=np.uint32).tofile(self._file)
                waiting.clear()
        np.array(waiting, dtype=np.uint32).tofile(self._file)
        self._file.flush()
        self.starts: Places = np.cumsum(np.array(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, first: int, end: int) -> Ids:
        """Ids of the texts from `first` to before `end`, one after the other."""
        start, stop = int(self.starts[first]), int(self.starts[end])
        self._file.seek(start * 4)
        return np.fromfile(self._file, dtype=np.uint32, count=stop - start)

    def blocks(self) -> Iterator[tuple[int, Ids, Places]]:
        """Blocks of texts: number of the first one, ids, and where each text starts in them, with
        the end of the last one.
        """
        for first in range(0, len(self), _BLOCK):
            end = min(first + _BLOCK, len(self))
            yield first, self.read(first, end), self.starts[first : end + 1] - self.starts[first]


def mixed(values: NDArray[np.unsignedinteger]) -> Hashes:
    """A well spread 64-bit number for each number (splitmix64's last steps)."""
    x = values.astype(np.uint64) + _MIX
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def powers(count: int) -> Hashes:
    """base^0 .. base^(count - 1) modulo 2^64."""
    found = np.full(max(count, 1), _BASE, dtype=np.uint64)
    found[0] = 1
    return np.cumprod(found, dtype=np.uint64)


def rolling(ids: Ids, starts: Places, length: int) -> tuple[Hashes, Places]:
    """A hash of each run of `length` words inside a text.

    Args:
        ids: word ids of several texts, one after the other.
        starts: where each text starts, and the end of the last one.
        length: words in a run.

    Returns:
        The hashes, text by text, and where the hashes of each text start, with the end.
    """
    counts = np.maximum(np.diff(starts) - length + 1, 0)
    places = np.concatenate([[0], np.cumsum(counts)])
    total = int(places[-1])
    if not total:
        return np.zeros(0, dtype=np.uint64), places
    at = np.arange(total) - np.repeat(places[:-1], counts) + np.repeat(starts[:-1], counts)
    spread, found = mixed(ids), np.zeros(total, dtype=np.uint64)
    for offset, factor in enumerate(powers(length)):
        found += spread[at + offset] * factor
    return mixed(found), places


def whole(ids: Ids, starts: Places, chosen: NDArray[np.bool_] | None = None) -> Hashes:
    """A hash of each text's words in order.

    Args:
        ids: word ids of several texts, one after the other.
        starts: where each text starts, and the end of the last one.
        chosen: which words count. None: all.
    """
    picked = np.ones(len(ids), dtype=bool) if chosen is None else chosen
    rank = np.concatenate([[0], np.cumsum(picked)])
    counts = rank[starts[1:]] - rank[starts[:-1]]
    place = rank[:-1] - np.repeat(rank[starts[:-1]], np.diff(starts))
    longest = int(counts.max(initial=0))
    terms = np.where(picked, mixed(ids) * powers(longest + 1)[np.minimum(place, longest)], 0)
    sums = np.concatenate([[np.uint64(0)], np.cumsum(terms.astype(np.uint64), dtype=np.uint64)])
    return mixed(sums[starts[1:]] - sums[starts[:-1]] + mixed(counts.astype(np.uint64)))
