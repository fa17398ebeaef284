"""Find texts that share most of their words: MinHash (Broder 1997) with locality-sensitive hashing,
and the true Jaccard similarity of every pair that it proposes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .text import FILLERS
from .words import DECIDES, NUMBER, Hashes, Ids, Places, Vocabulary, Words, mixed, rolling, whole

Pairs = NDArray[np.int64]

LEAST_BOILERPLATE = 6
"""Words of the shortest run at the start or end of prompts that counts as boilerplate."""
MOST_BOILERPLATE = 96
BOILERPLATE_SHARE = 0.002
"""Share of different prompts that have such a run."""
COMMON_ROWS = 20
COMMON_SHARE = 0.01
"""A phrase is common if this many different prompts, and this share of them, have it."""
CONTENT_ALONE = 8
"""Words that a prompt must have beside boilerplate to be compared without it."""

EDGE = 32
"""First and last words beside fillers in which prompts must agree if nothing else says that they
ask the same: what is asked mostly stands there."""

_FILLERS = np.array(sorted(Vocabulary().ids(FILLERS)), dtype=np.uint32)
_NOTHING = whole(np.zeros(0, np.uint32), np.zeros(2, np.int64))[0]
_BUCKETS = 1 << 20
_NEIGHBOURS = 8
_SEVERAL = 2
_PERMUTATIONS = 128


@dataclass(frozen=True)
class Texts:
    """Texts with what is compared of them.

    Args:
        words: their words.
        whole: a hash of all words of each text.
        asked: a hash of the words that decide what is asked.
        telling: a hash of the words beside fillers.
        task: the same for texts with several numbers, and `whole` for others, by which different
            texts are counted.
        begins: number of words of boilerplate at the start of each text.
        ends: number of the word where boilerplate at its end starts.
    """

    words: Words
    whole: Hashes
    asked: Hashes
    telling: Hashes
    task: Hashes
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]

    def has_numbers(self) -> NDArray[np.bool_]:
        """True for texts with several numbers."""
        return self.task == self.asked

    def different(self) -> NDArray[np.bool_]:
        """True for the first text of those that ask the same: copies say nothing about how common
        a phrase is.
        """
        found = np.zeros(len(self.whole), dtype=bool)
        found[np.unique(self.task, return_index=True)[1]] = True
        return found

    def content(self, text: int) -> Ids:
        """The words of a text without boilerplate."""
        return self.words.read(text, text + 1)[self.begins[text] : self.ends[text]]

    def has_boilerplate(self, text: int) -> bool:
        return bool(self.ends[text] - self.begins[text] < self.length(text))

    def length(self, text: int) -> int:
        return int(self.words.starts[text + 1] - self.words.starts[text])


def compared(words: Words) -> Texts:
    """What is compared of texts."""
    none = np.zeros(0, np.uint64)
    all_words, asked, telling, task = [none], [none], [none], [none]
    for _, ids, starts in words.blocks():
        all_words.append(whole(ids, starts))
        asked.append(whole(ids, starts, (ids & DECIDES).astype(bool)))
        telling.append(whole(ids, starts, ~np.isin(ids, _FILLERS)))
        numbers = np.diff(np.append(0, np.cumsum((ids & NUMBER) > 0))[starts])
        task.append(np.where(numbers >= _SEVERAL, asked[-1], all_words[-1]))
    found = Texts(
        words,
        whole=np.concatenate(all_words),
        asked=np.concatenate(asked),
        telling=np.concatenate(telling),
        task=np.concatenate(task),
        begins=np.zeros(len(words), np.int32),
        ends=np.diff(words.starts).astype(np.int32),
    )
    begins, ends = _boilerplate(words, found.different())
    return replace(found, begins=begins, ends=ends)


def is_common(
    counts: NDArray[np.int64], texts: int, share: float = COMMON_SHARE
) -> NDArray[np.bool_]:
    """Whether so many of the texts have a phrase that it says nothing about any of them."""
    return counts >= max(COMMON_ROWS, share * texts)


def _boilerplate(
    words: Words, different: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where the content of each text begins and ends. Different texts are counted."""
    counts = np.zeros((2, _BUCKETS), dtype=np.int64)
    for first, ids, starts in words.blocks():
        chosen = np.repeat(different[first : first + len(starts) - 1], np.diff(starts))
        for side, (buckets, counted, _) in enumerate(_runs(ids, starts)):
            counts[side] += np.bincount(buckets[counted & chosen], minlength=_BUCKETS)
    frequent = is_common(counts, int(different.sum()), BOILERPLATE_SHARE)
    begins = np.zeros(len(words), dtype=np.int32)
    ends = np.diff(words.starts).astype(np.int32)
    for first, ids, starts in words.blocks():
        lengths, end = np.diff(starts), first + len(starts) - 1
        cut = []
        for side, (buckets, counted, length) in enumerate(_runs(ids, starts)):
            run = np.where(counted & frequent[side][buckets], length, 0)
            longest = np.maximum.reduceat(np.append(run, 0), starts[:-1]) * (lengths > 0)
            cut.append(longest)
        left = lengths - cut[0] - cut[1] > 0
        begins[first:end] = np.where(left, cut[0], 0)
        ends[first:end] = np.where(left, lengths - cut[1], lengths)
    return begins, ends


def _runs(
    ids: Ids, starts: Places
) -> list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]]:
    """For the runs of words from the start of each text, and for those up to its end: a bucket of
    the run that ends (starts) at each word, whether it counts as a run, and its length.
    """
    lengths = np.diff(starts)
    place = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
    found = []
    for from_start in (True, False):
        length = (place if from_start else np.repeat(lengths, lengths) - 1 - place) + 1
        counted = (length >= LEAST_BOILERPLATE) & (length <= MOST_BOILERPLATE)
        spread = mixed(ids) * mixed(length.astype(np.uint64))
        sums = np.concatenate([[np.uint64(0)], np.cumsum(spread, dtype=np.uint64)])
        if from_start:
            run = sums[1:] - np.repeat(sums[starts[:-1]], lengths)
        else:
            run = np.repeat(sums[starts[1:]], lengths) - sums[:-1]
        found.append(((mixed(run) & np.uint64(_BUCKETS - 1)).astype(np.int64), counted, length))
    return found


@lru_cache
def bands_of(threshold: float) -> tuple[int, int]:
    """Bands, and rows per band, of the sharpest filter that proposes a pair at the threshold with
    probability 0.995: 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets, 3.4).
    """
    for rows in range(_PERMUTATIONS, 0, -1):
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= 0.995:
            return bands, rows
    return _PERMUTATIONS, 1


def proposed(
    texts: Texts, chosen: NDArray[np.bool_], shingle: int, threshold: float, answers: Hashes
) -> Pairs:
    """Pairs of texts that are likely to be similar and ask the same.

    Args:
        texts: the texts.
        chosen: texts that take part.
        shingle: words per shingle.
        threshold: Jaccard similarity at which a pair must be found.
        answers: a hash of the answer of each text, 0 if there is none. Texts with the same answer
            that ask the same are proposed too, however many other words they have, and so are
            texts without an answer that have the same words beside fillers.

    Returns:
        Pairs `[P, 2]`, sorted by the later text, then the earlier one.
    """
    owner, asked, tables = _tables(texts, chosen, shingle, threshold)
    known = (answers[owner] != 0) & (asked != _NOTHING)
    alone = np.arange(len(owner), dtype=np.uint64)
    telling = texts.telling[owner]
    named = (answers[owner] == 0) & (telling != _NOTHING)
    same = np.where(known, mixed(asked + answers[owner]), np.where(named, telling, mixed(alone)))
    same = same >> np.uint64(32)
    tables = np.concatenate([tables, same.astype(np.uint32)[:, None]], axis=1)
    found = np.zeros(0, dtype=np.int64)
    for table in tables.T:
        order = np.argsort(table, kind="stable")
        ordered = table[order]
        pairs = []
        for step in range(1, min(_NEIGHBOURS + 1, len(order))):
            at = np.flatnonzero(ordered[:-step] == ordered[step:])
            pairs.append((order[at], order[at + step]))
        first = np.searchsorted(ordered, ordered, side="left")
        pairs.append((order[first], order))
        for one, other in pairs:
            fits = (asked[one] == asked[other]) & (owner[one] != owner[other])
            left, right = owner[one[fits]], owner[other[fits]]
            coded = np.maximum(left, right) << 32 | np.minimum(left, right)
            found = np.union1d(found, coded)
    return np.stack([found >> 32, found & 0xFFFFFFFF], axis=1)


def _tables(
    texts: Texts, chosen: NDArray[np.bool_], shingle: int, threshold: float
) -> tuple[NDArray[np.int64], Hashes, NDArray[np.uint32]]:
    """Band hashes of the chosen texts, and of those with boilerplate also of their content.

    Returns:
        Number of the text `[I]`, hash of what it asks `[I]`, band hashes `[I, bands]`.
    """
    bands, rows = bands_of(threshold)
    owners, asked, tables = [], [], []
    for first, ids, starts in texts.words.blocks():
        here = np.arange(first, first + len(starts) - 1)
        begins, ends = starts[:-1] + texts.begins[here], starts[:-1] + texts.ends[here]
        part = chosen[here]
        owners.append(here[part])
        asked.append(texts.asked[here[part]])
        tables.append(_bands(ids, starts[:-1][part], starts[1:][part], shingle, bands, rows))
        part = part & (ends - begins < np.diff(starts)) & (ends - begins >= CONTENT_ALONE)
        if part.any():
            picked, places = cut(ids, begins[part], ends[part])
            decides = (picked & DECIDES).astype(bool)
            owners.append(here[part])
            asked.append(whole(picked, places, decides))
            tables.append(_bands(ids, begins[part], ends[part], shingle, bands, rows))
    if not owners:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros((0, bands), np.uint32)
    return np.concatenate(owners), np.concatenate(asked), np.concatenate(tables)


def cut(ids: Ids, begins: Places, ends: Places) -> tuple[Ids, Places]:
    lengths = ends - begins
    places = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(places[-1]) - np.repeat(places[:-1], lengths) + np.repeat(begins, lengths)
    return ids[at], places


def _bands(
    ids: Ids, begins: Places, ends: Places, shingle: int, bands: int, rows: int
) -> NDArray[np.uint32]:
    from rensa import RMinHash

    if not len(begins):
        return np.zeros((0, bands), dtype=np.uint32)
    shingles, places = rolling(*cut(ids, begins, ends), shingle)
    sketches = RMinHash.digest_matrix_from_flat_token_hashes(
        shingles, places.astype(np.uint64), bands * rows, 0
    )
    digests = np.array(sketches.to_rows(), dtype=np.uint64).reshape(len(begins), bands, rows)
    factors = mixed(np.arange(rows, dtype=np.uint64))
    return (mixed((mixed(digests) * factors).sum(axis=2)) >> np.uint64(32)).astype(np.uint32)


class Similarity:
    """How much of their words two texts share.

    Args:
        texts: the texts.
        shingle: words per shingle.
    """

    def __init__(self, texts: Texts, shingle: int) -> None:
        self._texts = texts
        self._shingle = shingle
        self._sets = lru_cache(maxsize=1 << 13)(self._set)

    def jaccard(self, one: int, other: int) -> float:
        """Jaccard similarity of shingles, in [0, 1].

        Boilerplate that both have does not count, unless little is left: it may be a common
        beginning of different questions. If one has boilerplate, it may do without it, and so may
        either, as the other's boilerplate may hide its own.
        """
        texts = self._texts
        content = self._jaccard((one, True), (other, True), self._shingle)
        marked = [text for text in (one, other) if texts.has_boilerplate(text)]
        if not marked:
            return content
        if len(marked) == 1:
            return max(content, self._jaccard((one, False), (other, False), self._shingle))
        if min(texts.ends[text] - texts.begins[text] for text in marked) < CONTENT_ALONE:
            return min(content, self._jaccard((one, False), (other, False), self._shingle))
        mixed_up = [((one, True), (other, False)), ((one, False), (other, True))]
        return max(content, *(self._jaccard(*pair, self._shingle) for pair in mixed_up))

    def shared(self, one: int, other: int) -> float:
        """Share of the shingles of one text that the other has too, or Jaccard similarity of
        single words, whichever is more. For texts that are likely to ask the same.
        """
        left, right = (self._sets(text, False, self._shingle) for text in (one, other))
        inside = len(left & right) / max(min(len(left), len(right)), 1)
        return max(inside, self._jaccard((one, True), (other, True), 1))

    def agree(self, one: int, other: int) -> bool:
        """Whether both begin and end with the same words beside fillers, in the same order."""
        left, right = (self._telling(text) for text in (one, other))
        return np.array_equal(left[:EDGE], right[:EDGE]) and np.array_equal(
            left[-EDGE:], right[-EDGE:]
        )

    def _telling(self, text: int) -> Ids:
        ids = self._texts.words.read(text, text + 1)
        return ids[~np.isin(ids, _FILLERS)]

    def _jaccard(self, one: tuple[int, bool], other: tuple[int, bool], shingle: int) -> float:
        left, right = self._sets(*one, shingle), self._sets(*other, shingle)
        union = len(left | right)
        return len(left & right) / union if union else 0.0

    def _set(self, text: int, content: bool, shingle: int) -> frozenset[int]:
        ids = self._texts.content(text) if content else self._texts.words.read(text, text + 1)
        hashes, _ = rolling(ids, np.array([0, len(ids)]), shingle)
        return frozenset(hashes.tolist())
