"""Seeds are the same in every release: a run that is repeated later draws the same."""

from __future__ import annotations

from sixfold.seeds import ORDER_BYTES, SAMPLE_BYTES, STEP_BYTES, seed_bytes, seed_number


def test_the_numbers_of_three_texts() -> None:
    assert seed_number("3/41", STEP_BYTES) == 60649253575963251
    assert seed_number("3\x00task 7\x002", SAMPLE_BYTES) == 73502509885420
    assert seed_bytes("3:task 7", ORDER_BYTES).hex() == "e7fa7614da6d8d7d"
    assert seed_bytes("3", 16, "accept") != seed_bytes("3", 16)
