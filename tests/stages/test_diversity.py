"""Diversity metrics, against hand-computed values and a direct formula."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.stages.diversity import Diversity, template


def measured(texts: list[str], n: int = 3) -> Diversity:
    found = Diversity(n)
    for text in texts:
        found.add(text)
    return found


def entropy(texts: list[str], n: int = 3) -> float:
    return measured(texts, n).metrics()["sample/ngram_entropy"]


def share(texts: list[str]) -> float:
    return measured(texts).metrics()["sample/top5_templates"]


def test_entropy_of_known_distributions() -> None:
    assert entropy([]) == 0.0
    assert entropy(["a b c"] * 7) == 0.0
    assert entropy(["a b c", "a b d"]) == 1.0
    assert entropy(["a b c d", "b c d e", "x y z"]) == pytest.approx(
        math.log2(5) - 2 / 5
    )  # of five 3-grams, one occurs twice
    assert entropy(["a b", "a b", "c d", "e f"], n=1) == pytest.approx(
        2 * math.log2(4) / 4 + math.log2(8) / 2
    )


def test_without_spaces_units_are_characters() -> None:
    assert entropy(["1+2=3"]) == pytest.approx(math.log2(3))
    assert entropy(["你好\n吗"]) == 0.0
    assert entropy(["ab", "ab", "cd", "cd"]) == 1.0  # shorter than n: one n-gram each


WORDS = st.lists(st.sampled_from("abc"), min_size=2, max_size=8).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_entropy_is_that_of_the_formula(texts: list[str], n: int) -> None:
    grams = Counter(
        text.split()[i : i + n].__str__()
        for text in texts
        for i in range(max(1, len(text.split()) - n + 1))
    )
    total = grams.total()
    expected = -sum(c / total * math.log2(c / total) for c in grams.values())
    assert entropy(texts, n) == pytest.approx(expected, abs=1e-12)
    assert entropy(texts[::-1], n) == entropy(texts, n)


def test_numbers_and_white_space_do_not_make_a_template() -> None:
    assert template(" 3 +  1,234.5\n= x7.") == "# + # = x#."
    assert template("3-5") == template("10-2") == "#-#"


def test_share_of_the_five_commonest_templates() -> None:
    assert share([]) == 0.0
    assert share([f"{i} is it" for i in range(30)]) == 1.0
    letters = "abcdefghij"
    assert share([f"{a} {i}" for a in letters for i in range(3)]) == 0.5
    texts = [letters[min(i, 9)] + " x" for i in range(5)] + [f"{'y' * i} z" for i in range(1, 16)]
    assert share(texts) == 5 / 20


def test_the_alarm_begins_at_half() -> None:
    half = [f"{a} {i}" for a in "abcdefghij" for i in range(2)]
    line = measured(half).alarm()
    assert "sample/top5_templates = 50%" in line and "'a #'" in line and "20" in line
    assert measured([*half, "k 1"]).alarm() == ""
    assert measured(half[:19]).alarm() == ""  # too few to tell
