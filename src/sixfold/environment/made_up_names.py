"""Names that no model knows: syllables of a consonant and a vowel."""

from __future__ import annotations

import random
from collections.abc import Collection

CONSONANTS, VOWELS = "bdklmnst", "aeiou"

SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)


def made_up_names(
    rng: random.Random, count: int, *, syllables: int, but: Collection[str] = ()
) -> list[str]:
    """Different names in random order.

    Args:
        rng: source of randomness.
        count: number of names.
        syllables: syllables per name.
        but: names that are taken.
    """
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        name = "".join(rng.choices(SYLLABLES, k=syllables))
        if name not in but:
            drawn[name] = None
    return list(drawn)
