"""Texts that say the same as the prompt of an evaluation in other words: TF-IDF over word stems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .text import is_unspaced, tokens
from .words import Ids, Places, Vocabulary, Words

Weights = NDArray[np.float64]

ALIKE = 0.6
"""Cosine from which on two texts say the same."""
ALIKE_WITH_NUMBERS = 0.4
"""Cosine without numbers from which on two texts with the same numbers say the same."""
ALIKE_WITH_OTHER_NUMBERS = 0.8
"""Cosine from which on two texts say the same although most of their numbers differ."""
LEAST_NUMBERS = 2
"""Different numbers that both must have for that."""
LEAST_TELLING = 4
"""Words of an evaluation prompt that few texts have, if it is compared."""
TELLING = 1.0
"""Weight of such a word: less than two in five texts have it."""
CANDIDATE = 0.3
"""Cosine from which on a pair is looked at closely."""

_OTHER = 1 << 20
"""Buckets of the words that no evaluation prompt has."""
_CELLS = 1 << 22
_COMMON = 0.3
"""Share of evaluation prompts with a stem from which on it proposes no pair."""
_SUFFIXES = ("ings", "ing", "edly", "ed", "es", "s", "ly")


def stem(word: str) -> str:
    """A word without its usual endings."""
    if len(word) < 4 or not word.isalpha():
        return word
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word[: -len(suffix)][:7].rstrip("e")
    return word[:7].rstrip("e")


class Likeness(NamedTuple):
    """A text and the prompt that it paraphrases.

    Args:
        text: number of the text.
        prompt: number of the prompt.
        cosine: cosine of their TF-IDF weights.
        same_numbers: whether they have the same numbers.
    """

    text: int
    prompt: int
    cosine: float
    same_numbers: bool


class Paraphrases:
    """Stems of evaluation prompts.

    Args:
        prompts: the prompts.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self._stems: dict[str, int] = {}
        numbers: set[int] = set()
        signs: set[int] = set()
        rows = []
        for prompt in prompts:
            row = set()
            for word in tokens(prompt):
                feature = self._stems.setdefault(stem(word), len(self._stems))
                row.add(feature)
                if word[0].isdigit():
                    numbers.add(feature)
                elif len(word) == 1 or is_unspaced(word):
                    signs.add(feature)
            rows.append(np.array(sorted(row), dtype=np.int64))
        self._rows = rows
        features = range(len(self._stems))
        self._numbers = np.array([f in numbers for f in features], dtype=bool)
        self._is_word = np.array([f not in numbers | signs for f in features], dtype=bool)
        self._features: dict[int, int] = {}
        self.vocabulary = Vocabulary(self._meet)

    def _meet(self, word: str, number: int) -> None:
        feature = self._stems.get(stem(word))
        if feature is not None:
            self._features[number] = feature

    def weigh(self, texts: Words) -> None:
        """Weigh stems by how rare they are in the texts. `texts` has this object's vocabulary."""
        met = sorted(self._features.items())
        self._ids = np.array([number for number, _ in met], dtype=np.uint32)
        self._of_id = np.array([feature for _, feature in met], dtype=np.int64)
        counts = np.zeros(len(self._stems) + _OTHER, dtype=np.int64)
        for _, ids, starts in texts.blocks():
            counts += np.bincount(self._pairs(ids, starts)[1], minlength=len(counts))
        for row in self._rows:
            counts[row] += 1
        self._idf: Weights = np.log((1 + len(texts) + len(self._rows)) / (1 + counts)) + 0.1
        sizes = [len(row) for row in self._rows]
        prompt = np.repeat(np.arange(len(self._rows)), sizes)
        feature = np.concatenate([*self._rows, np.zeros(0, np.int64)])
        order = np.argsort(feature, kind="stable")
        self._prompt = prompt[order]
        self._bounds = np.searchsorted(feature[order], np.arange(len(self._stems) + 1))
        telling = [self._is_word[row] & (self._idf[row] >= TELLING) for row in self._rows]
        self._is_compared = [int(row.sum()) >= LEAST_TELLING for row in telling]
        self._norms = np.array([math.sqrt((self._idf[row] ** 2).sum()) for row in self._rows])

    def _pairs(self, ids: Ids, starts: Places) -> tuple[Places, Places]:
        """Text and feature of each different word of each text."""
        text = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        # The lowest bit that is left says whether the word is a number.
        features = len(self._stems) + (ids >> 1).astype(np.int64) % _OTHER
        if len(self._ids):
            at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
            features = np.where(self._ids[at] == ids, self._of_id[at], features)
        return np.divmod(
            np.unique(text * (len(self._stems) + _OTHER) + features), len(self._stems) + _OTHER
        )

    def found(self, texts: Words) -> Iterator[Likeness]:
        """Texts that paraphrase a prompt."""
        step = max(1, _CELLS // max(len(self._rows), 1))
        for first, ids, starts in texts.blocks():
            text, feature = self._pairs(ids, starts)
            norms = np.sqrt(np.bincount(text, self._idf[feature] ** 2, len(starts) - 1))
            for begin in range(0, len(starts) - 1, step):
                low, high = np.searchsorted(text, [begin, begin + step])
                part = slice(low, high)
                count = min(step, len(starts) - 1 - begin)
                scores = self._scores(text[part] - begin, feature[part], count)
                scores /= np.maximum(norms[begin : begin + count, None] * self._norms, 1e-9)
                prompts = scores.argmax(axis=1)
                close = scores[np.arange(count), prompts] >= CANDIDATE
                for row in np.flatnonzero(close).tolist():
                    low, high = np.searchsorted(text, [begin + row, begin + row + 1])
                    like = self._judged(feature[low:high], int(prompts[row]))
                    if like:
                        yield Likeness(first + begin + row, int(prompts[row]), *like)

    def _scores(self, text: Places, feature: Places, count: int) -> Weights:
        """Sum of squared weights of the stems that texts and prompts share `[texts, prompts]`."""
        known = feature < len(self._stems)
        text, feature = text[known], feature[known]
        sizes = self._bounds[feature + 1] - self._bounds[feature]
        telling = sizes <= max(_COMMON * len(self._rows), 2)
        text, feature, sizes = text[telling], feature[telling], sizes[telling]
        at = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        at += np.repeat(self._bounds[feature], sizes)
        cells = np.repeat(text, sizes) * len(self._rows) + self._prompt[at]
        weights = np.repeat(self._idf[feature] ** 2, sizes)
        total = count * len(self._rows)
        return np.bincount(cells, weights, total).astype(np.float64).reshape(count, len(self._rows))

    def _judged(self, features: Places, prompt: int) -> tuple[float, bool] | None:
        row = self._rows[prompt]
        if not self._is_compared[prompt]:
            return None
        cosine = self._cosine(features, row)
        number, wanted = self._is_number(features), self._is_number(row)
        shared = len(np.intersect1d(features[number], row[wanted]))
        different = int(number.sum() + wanted.sum()) - shared
        if shared < different or shared < LEAST_NUMBERS:
            least = ALIKE if 2 * shared >= different else ALIKE_WITH_OTHER_NUMBERS
            return (cosine, False) if cosine >= least else None
        without = self._cosine(features[~number], row[~wanted])
        return (cosine, True) if cosine >= ALIKE or without >= ALIKE_WITH_NUMBERS else None

    def _is_number(self, features: Places) -> NDArray[np.bool_]:
        other = features >= len(self._stems)
        return np.where(
            other,
            (features - len(self._stems)) & 1,
            self._numbers[np.minimum(features, len(self._stems) - 1)],
        ).astype(bool)

    def _cosine(self, one: Places, other: Places) -> float:
        weights = [float((self._idf[part] ** 2).sum()) for part in (one, other)]
        shared = float((self._idf[np.intersect1d(one, other)] ** 2).sum())
        return shared / math.sqrt(weights[0] * weights[1]) if all(weights) else 0.0
