"""Nothing that a model wrote reaches a terminal or a page as anything but visible text."""

from __future__ import annotations

import html
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from sixfold.report.untrusted import escape, one_line, visible

ANYTHING = st.text(st.characters(codec=None, categories=None), max_size=80)


@given(ANYTHING)
def test_no_control_reordering_or_surrogate_character_is_left(text: str) -> None:
    shown = visible(text)
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - {"\n", "\t"}
    assert not left
    assert not {
        c
        for c in shown
        if unicodedata.bidirectional(c)
        in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }
    shown.encode("utf-8")


@given(ANYTHING)
def test_escaped_text_has_no_markup_and_reads_back(text: str) -> None:
    escaped = escape(text)
    assert not {"<", ">", '"', "'"} & set(escaped)
    assert html.unescape(escaped) == visible(text)


@given(ANYTHING, st.integers(1, 40))
def test_one_line_is_one_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert "\n" not in line and "\t" not in line


def test_ordinary_text_is_left_alone() -> None:
    text = "naïve 数学 → 12 × 34 = 408\n\tif (a && b) 👩‍🔬"
    assert visible(text) == text
    assert visible("\x1b[2J\x00\x7f\u202e") == "␛[2J␀␡⟨U+202E⟩"
