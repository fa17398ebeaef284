"""Diversity of a dataset's completions: entropy of their n-grams, and their commonest templates."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter

import numpy as np

COMMONEST = 5
"""Number of templates whose share is measured."""
ALARM_SHARE = 0.5
"""Share of the commonest templates from which there is an alarm."""
LEAST_COMPLETIONS = 20
"""Fewer completions give no alarm: they have few templates even if all of them differ."""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SHOWN = 60


def template(text: str) -> str:
    """A completion with `#` for every number and one space for white space.

    A sign is not part of a number: it may be a minus between two of them.
    """
    return " ".join(_NUMBER.sub("#", text).split())


class Diversity:
    """Statistics of completions, which are added one by one. It holds 8 bytes per n-gram.

    The units of a completion are words, separated by white space. Without a space in it, as in
    Chinese or `1+2=3`, they are characters. A completion of fewer than n units is one n-gram.

    Args:
        n: length of the n-grams.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._grams = array("q")
        self._templates: Counter[tuple[int, str]] = Counter()

    def add(self, text: str) -> None:
        """Count a completion."""
        words, n = text.split(), self._n
        units = tuple(words if " " in text.strip() else "".join(words))
        starts = range(max(len(units) - n, 0) + 1)
        self._grams.extend(hash(units[start : start + n]) for start in starts)
        found = template(text)
        self._templates[hash(found), found[:_SHOWN]] += 1

    def metrics(self) -> dict[str, float]:
        """`sample/ngram_entropy` in bits per n-gram, and `sample/top5_templates`, a share."""
        return {"sample/ngram_entropy": self._entropy(), "sample/top5_templates": self._share()}

    def alarm(self) -> str:
        """A line if a few templates make up half of the completions, otherwise ""."""
        share, completions = self._share(), self._templates.total()
        if share < ALARM_SHARE or completions < LEAST_COMPLETIONS:
            return ""
        ((_, first), _), *_ = self._templates.most_common(1)
        return (
            f"sample/top5_templates = {share:.0%} of {completions} completions have one of the"
            f" {COMMONEST} commonest templates, the first of which is {first!r}. Sample at a higher"
            " temperature, keep fewer per task (sample.per_task), or use other tasks"
        )

    def _entropy(self) -> float:
        """-sum of p * log2(p) over the different n-grams. p is the share of one."""
        total = len(self._grams)
        _, counts = np.unique(np.frombuffer(self._grams, dtype=np.int64), return_counts=True)
        # Exact in any order: that of the hashes differs between processes.
        return math.fsum(c / total * math.log2(total / c) for c in counts.tolist())

    def _share(self) -> float:
        most = self._templates.most_common(COMMONEST)
        return sum(count for _, count in most) / max(self._templates.total(), 1)
