"""Rewards for the number of words, and against repetition.

A limit on tokens is no reward here: `algorithm.overlong_buffer` penalises long completions.
"""

from __future__ import annotations

import re
import unicodedata
import zlib

from ...types import Task
from ..answer_part import answer_part
from ..grade import Grade, right_or_wrong
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


def word_count(completion: str, task: Task) -> Grade:
    """1 if the number of words is between the columns min_words and max_words of the task.

    Either column may be absent. The text after the last thought is counted.

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
    words = count_words(visible(text))
    # Zero-width characters must neither add words to reach a minimum, nor hide words from a
    # maximum.
    at_most = count_words("".join(" " if invisible(c) else c for c in text))
    if least is not None and words < least:
        return Grade(0.0, "wrong_answer", f"{words} words, at least {least} asked")
    if most is not None and at_most > most:
        return Grade(0.0, "wrong_answer", f"{at_most} words, at most {most} asked")
    return Grade(1.0, "passed", f"{words} words")


def no_repetition(completion: str, task: Task) -> Grade:
    """0 if the completion repeats itself, otherwise 1. Thoughts count too.

    It repeats itself if at least half of its sequences of three words occurred before, or if a text
    with hardly any spaces can be compressed to a tenth.
    """
    if forged := forged_turn(completion):
        return Grade(0.0, "rejected", f"spells {forged}")
    words = [word.casefold() for word in _WORD.findall(visible(completion))]
    ngrams = list(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
    if len(ngrams) >= MIN_NGRAMS and repeated >= MAX_REPEATED:
        return Grade(0.0, "rejected", f"{repeated:.0%} of its 3-grams are repeated")
    longest = max(words, key=len, default="")
    if len(longest) >= LONG_RUN:
        size = len(longest.encode("utf-8", "replace"))
        if len(zlib.compress(longest.encode("utf-8", "replace"), 1)) < MIN_COMPRESSED * size:
            return Grade(0.0, "rejected", "a long text without spaces repeats itself")
    return right_or_wrong(bool(words))


def count_words(text: str) -> int:
    """Number of words: runs without white space that have a letter or a digit.

    Each ideograph or kana counts as a word.
    """
    return sum(
        any(unicodedata.category(character)[0] in "LN" for character in word)
        for word in _WORD.findall(text)
    )


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
