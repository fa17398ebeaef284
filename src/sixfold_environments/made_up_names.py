"""Made-up names of two syllables. Each syllable can be a token of a small vocabulary.

The two syllables come from different lists, so a model can tell the end of a name from its
beginning.
"""

from __future__ import annotations

import random
from collections.abc import Collection

FIRST_SYLLABLES = tuple(consonant + vowel for consonant in "bdklmnst" for vowel in "aeiou")
LAST_SYLLABLES = tuple(
    consonant + end for consonant in "fghjpvwz" for end in ("an", "er", "il", "os", "um")
)


def made_up_names(rng: random.Random, count: int, *, but: Collection[str] = ()) -> list[str]:
    """Draw different names.

    Args:
        rng: source of randomness.
        count: number of names. There are 1,600.
        but: names to leave out.
    """
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        name = rng.choice(FIRST_SYLLABLES) + rng.choice(LAST_SYLLABLES)
        if name not in but:
            drawn[name] = None
    return list(drawn)
