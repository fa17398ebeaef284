"""Runs of words that texts share with the prompts of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .similar import is_common
from .words import NUMBER, Hashes, Ids, Places, Words, rolling

COVERED = 0.5
"""Share of an evaluation prompt's n-grams that a text must have."""
FRAGMENT = 0.8
"""Share of a text's own n-grams that must be in one evaluation prompt, if it is a part of it."""
LONG_RUN = 13
"""Words of a shared run that is enough by itself."""
MASKED = 0.8
"""Share of an evaluation prompt's n-grams that a text must have when numbers are masked."""
LEAST_MATCHES = 3
"""n-grams that must match, of a prompt some of whose n-grams are common phrases."""
COMMON_IN_EVALUATIONS = 3
"""A phrase in this many prompts of the evaluations, and 1 % of them, is common."""

_NUMBER_MARK = np.uint32(NUMBER)


def masked(ids: Ids) -> Ids:
    """Word ids with one id for all numbers."""
    return np.where(ids & NUMBER, _NUMBER_MARK, ids).astype(np.uint32)


class Match(NamedTuple):
    """A text and the prompt of an evaluation with which it shares most.

    Args:
        text: number of the text.
        prompt: number of the prompt.
        share: n-grams shared, of those of the shorter of both.
        run: words of the longest shared run.
    """

    text: int
    prompt: int
    share: float
    run: int


class Phrases:
    """The n-grams of evaluation prompts.

    Args:
        prompts: words of the prompts.
        length: words of an n-gram.
        mask: numbers are all the same.
        density: words of each prompt per word with spaces (`text.tokens_per_word`).
    """

    def __init__(
        self, prompts: Words, length: int, mask: bool, density: NDArray[np.float64]
    ) -> None:
        self._density = density
        self._length, self._mask, self._prompts = length, mask, len(prompts)
        ids, starts = prompts.read(0, len(prompts)), prompts.starts
        hashes, places = rolling(masked(ids) if mask else ids, starts, length)
        counts = np.diff(places)
        prompt = np.repeat(np.arange(len(prompts)), counts)
        order = np.argsort(hashes, kind="stable")
        self._hashes, first = np.unique(hashes[order], return_index=True)
        self._bounds = np.append(first, len(order))
        self._prompt = prompt[order]
        self._position = (np.arange(len(hashes)) - np.repeat(places[:-1], counts))[order]
        self._gram = np.repeat(np.arange(len(self._hashes)), np.diff(self._bounds))
        pairs = np.unique(np.stack([self._gram, self._prompt]), axis=1)
        within = np.bincount(pairs[0], minlength=len(self._hashes))
        self._common = within >= max(COMMON_IN_EVALUATIONS, 0.01 * len(prompts))
        self._all = counts

    def leave_out_common(self, texts: Words, different: NDArray[np.bool_]) -> int:
        """Leave out n-grams that are common in the texts. Returns how many n-grams are left out.

        Args:
            texts: the texts.
            different: texts that count.
        """
        counts = np.zeros(len(self._hashes), dtype=np.int64)
        for first, ids, starts in texts.blocks():
            text, gram, _ = self._hits(ids, starts)
            chosen = different[first + text]
            pairs = np.unique(text[chosen] * len(self._hashes) + gram[chosen])
            counts += np.bincount(pairs % max(len(counts), 1), minlength=len(counts))
        self._common |= is_common(counts, int(different.sum()))
        usable = ~self._common[self._gram]
        self._usable = np.bincount(self._prompt[usable], minlength=self._prompts)
        return int(self._common.sum())

    def _hits(self, ids: Ids, starts: Places) -> tuple[Places, Places, Places]:
        """Text, n-gram, and the number of n-grams of each text."""
        hashes, places = rolling(masked(ids) if self._mask else ids, starts, self._length)
        counts = np.diff(places)
        if not len(self._hashes):
            return np.zeros(0, np.int64), np.zeros(0, np.int64), counts
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        hit = self._hashes[at] == hashes
        return np.repeat(np.arange(len(counts)), counts)[hit], at[hit], counts

    def matches(self, texts: Words) -> Iterator[Match]:
        """For each text that shares enough with a prompt: the one with which it shares most."""
        for first, ids, starts in texts.blocks():
            text, gram, counts = self._hits(ids, starts)
            usable = ~self._common[gram]
            text, gram = text[usable], gram[usable]
            sizes = self._bounds[gram + 1] - self._bounds[gram]
            at = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            at += np.repeat(self._bounds[gram], sizes)
            pair = np.repeat(text, sizes) * self._prompts + self._prompt[at]
            best: dict[int, Match] = {}
            for found in self._pairs(pair, self._position[at], counts):
                held = best.get(found.text)
                if held is None or (found.share, found.run) > (held.share, held.run):
                    best[found.text] = found
            yield from (match._replace(text=first + match.text) for match in best.values())

    def _pairs(self, pair: Places, position: Places, counts: Places) -> Iterator[Match]:
        longest = int(self._all.max(initial=1)) + 1
        codes = np.unique(pair * longest + position)
        bounds = np.flatnonzero(np.diff(codes // longest)) + 1
        for part in np.split(codes, bounds) if len(codes) else ():
            text, prompt = divmod(int(part[0]) // longest, self._prompts)
            breaks = np.flatnonzero(np.diff(part) != 1) + 1
            run = int(np.diff(np.concatenate([[0], breaks, [len(part)]])).max())
            found = self._judged(text, prompt, len(part), run, int(counts[text]))
            if found:
                yield found

    def _judged(self, text: int, prompt: int, shared: int, run: int, grams: int) -> Match | None:
        usable, all_grams = int(self._usable[prompt]), int(self._all[prompt])
        # Of a short task before common boilerplate, only n-grams that reach into both are left.
        density = float(self._density[prompt])
        least = self._length if self._mask else LEAST_MATCHES * density
        if shared < min(least, all_grams):
            return None
        share, run_words = shared / usable, run + self._length - 1
        if share >= (MASKED if self._mask else COVERED):
            return Match(text, prompt, share, run_words)
        if self._mask:
            return None
        if shared / grams >= FRAGMENT or run_words >= LONG_RUN * density:
            return Match(text, prompt, max(share, shared / grams), run_words)
        return None


def contained(prompts: Words, chosen: Places, texts: Words) -> Iterator[tuple[int, int]]:
    """Texts that have a whole short prompt in them, and the prompt.

    A prompt ends where a word comes that would change what it asks: "3 + 4" is not in "3 + 4 * 5".

    Args:
        prompts: words of the prompts.
        chosen: numbers of the prompts that are looked for.
        texts: the texts.
    """
    lengths = np.diff(prompts.starts)[chosen]
    for length in np.unique(lengths).tolist():
        of_length = chosen[lengths == length]
        wanted: dict[int, int] = {}
        for prompt in of_length.tolist():
            ids = prompts.read(prompt, prompt + 1)
            wanted.setdefault(int(rolling(ids, np.array([0, length]), length)[0][0]), prompt)
        hashes = np.array(sorted(wanted), dtype=np.uint64)
        for first, ids, starts in texts.blocks():
            found, places = rolling(ids, starts, length)
            at = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
            for hit in np.flatnonzero(hashes[at] == found).tolist():
                text = int(np.searchsorted(places, hit, side="right")) - 1
                begin = int(starts[text]) + hit - int(places[text])
                around = (
                    *ids[max(begin - 1, int(starts[text])) : begin],
                    *ids[begin + length : min(begin + length + 1, int(starts[text + 1]))],
                )
                if not any(int(word) & 1 for word in around):
                    yield first + text, wanted[int(found[hit])]


def hashes_of(words: Words, hashes: Hashes) -> dict[int, int]:
    """First text with each hash."""
    return {int(hashes[text]): text for text in reversed(range(len(words)))}
