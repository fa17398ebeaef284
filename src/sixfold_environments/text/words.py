"""Rewards for the number of words, and against repetition.

A limit on tokens is no reward here: `algorithm.overlong_buffer` penalises long completions.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence

from sixfold.environment.answer_part import answer_part
from sixfold.environment.grade import Grade, right_or_wrong
from sixfold.types import Task

from .marks import forged_turn, invisible, visible

NGRAM = 3
MIN_NGRAMS = 10
"""N-grams of the shortest text that can count as repetitive."""

MAX_REPEATED = 0.5
"""Share of n-grams that occurred before, from which a text is repetitive."""

LONG_RUN = 200
"""Characters of a text without spaces that is compressed instead."""

MIN_COMPRESSED = 0.1
"""Compressed size over size, below which a long text is repetitive. Prose has 0.3 to 0.5."""

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
_JOINT = re.compile(r"(?<=[^\W\d_])[,;!?…—|，。；！？、：_]+(?=[^\W\d_])")
"""Punctuation that joins words if the space after it is left out."""

MAX_PHRASE = 8
"""Longest phrase, in words, whose repetition does not count."""


def word_count(completion: str, task: Task) -> Grade:
    """1 if the number of words is between the columns min_words and max_words of the task.

    Either column may be absent. The text after the last thought is counted. Words that only repeat
    what was said do not count for the minimum.

    Raises:
        ValueError: if the task has neither column, or one that is not a whole number.
    """
    least, most = _bound(task, "min_words"), _bound(task, "max_words")
    if least is None and most is None:
        raise ValueError(
            f"task {task.id!r} has no column min_words or max_words. Add one of them to the data"
        )
    if forged := forged_turn(completion):
        return Grade(0.0, "rejected", f"spells {forged}")
    text = answer_part(completion)
    words = words_of(visible(text))
    # Zero-width characters and missing spaces must neither add words to reach a minimum, nor hide
    # words from a maximum.
    shown = "".join(" " if invisible(c) else c for c in text)
    at_most = len(words_of(_JOINT.sub(" ", shown)))
    if most is not None and at_most > most:
        return Grade(0.0, "wrong_answer", f"{at_most} words, at most {most} asked")
    if least is not None:
        new = _without_repetition(words)
        if new < least <= len(words):
            return Grade(
                0.0, "rejected", f"{new} words without repetitions, at least {least} asked"
            )
        if new < least:
            return Grade(0.0, "wrong_answer", f"{new} words, at least {least} asked")
    return Grade(1.0, "passed", f"{len(words)} words")


def no_repetition(completion: str, task: Task) -> Grade:
    """0 if the completion repeats itself, otherwise 1. Thoughts count too.

    It repeats itself if at least half of its sequences of three words occurred before, or if a text
    with hardly any spaces can be compressed to a tenth.
    """
    if forged := forged_turn(completion):
        return Grade(0.0, "rejected", f"spells {forged}")
    words = [word.casefold() for word in _WORD.findall(visible(completion))]
    if (repeated := _repeated_share(words)) >= MAX_REPEATED:
        return Grade(0.0, "rejected", f"{repeated:.0%} of its 3-grams are repeated")
    longest = max(words, key=len, default="")
    if len(longest) >= LONG_RUN:
        size = len(longest.encode("utf-8", "replace"))
        if len(zlib.compress(longest.encode("utf-8", "replace"), 1)) < MIN_COMPRESSED * size:
            return Grade(0.0, "rejected", "a long text without spaces repeats itself")
    return right_or_wrong(bool(words))


def words_of(text: str) -> list[str]:
    """Words: runs without white space that have a letter or a digit.

    Each ideograph or kana counts as a word.
    """
    return [
        word
        for word in _WORD.findall(text)
        if any(unicodedata.category(character)[0] in "LN" for character in word)
    ]


def _repeated_share(words: Sequence[str]) -> float:
    """Share of n-grams that occurred before. 0 for a short text."""
    ngrams = list(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if len(ngrams) >= MIN_NGRAMS else 0.0


def _without_repetition(words: Sequence[str]) -> int:
    """Number of words that fill no space: a phrase in a row counts twice, not more often.

    0 if the whole text repeats itself, or has fewer different words than the square root of their
    number. (Prose of 1,000 words has about 400.)
    """
    plain = [re.sub(r"[^\w]", "", word).casefold() for word in words]
    if len(set(plain)) ** 2 < len(plain) - 1 or _repeated_share(plain) >= MAX_REPEATED:
        return 0
    new = [True] * len(plain)
    for period in range(1, MAX_PHRASE + 1):
        run = 0
        for index in range(period, len(plain)):
            run = run + 1 if plain[index] == plain[index - period] else 0
            new[index] = new[index] and run <= period
    return sum(new)


def _bound(task: Task, column: str) -> int | None:
    value = task.columns.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"task {task.id!r}: column {column} is {value!r}, not a whole number")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not number.is_integer():
        raise ValueError(f"task {task.id!r}: column {column} is {value!r}, not a whole number")
    return int(number)
