"""Personal data is found by form and checksum, and a maths problem's numbers are not."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError
from rows_of_curation import record, run

from sixfold_curation.personal_data import PersonalData
from sixfold_curation.rows_on_disk import answer_text, prompt_text, stored
from sixfold_curation.stage import Record, decided

# Documentation and test numbers, with checksums that their standards publish.
FOUND = {
    "email": ["Write to bob.smith@gmail.com now", "x_1+tag@mail.uni-graz.at"],
    "phone": ["(212) 555-0147", "+44 20 7946 0958", "415-555-2671", "my phone is 4155552671"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "card": ["4111 1111 1111 1111", "5500-0000-0000-0004", "card 4111111111111111"],
    "national_id": ["536-22-8765", "12345678Z", "RSSMRA85T10A562S", "529.982.247-25"],
    "ip_address": ["8.8.8.8", "2001:4860:4860::8888"],
    "secret": ["AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "sk-proj-abcDEF1234567890abcdefXYZ"],
}

NOT_PERSONAL = [
    "Compute 415 - 555 - 2671.",
    "Find x if x = 4155552671 mod 7.",
    "The sequence 1-2-3-4-5-6-7 starts on 2023-10-05 at 12:30.",
    "pi is 3.14159265358979323846",
    "Find the remainder of 4111111111111111 divided by 7.",
    "Let $a@b = a + b$. Compute $3@4$.",
    "Version 1.2.3.4 runs at 192.168.1.1 and 127.0.0.1.",
    "Write to user@example.com.",
    "DE89 3704 0044 0532 0130 01 has a wrong checksum",
    "4111 1111 1111 1112 has a wrong checksum",
    "12345678A has a wrong letter",
    "$\\frac{123456789}{987654321}$ and 10000000000 and 2^{64} = 18446744073709551616",
    "The ratio is 12:34:56:78, the point (212, 555, 147).",
    "f(x) = x+49 and y = +4930901820",
    "Compute 500-20-1000.",
    "What is the difference 721-35-1280?",
    "Let d = 721-35-1280 + 4.",
    "scores = Q@K.transpose(1, 2); first = W@x.shape[0]",
]


def kinds(text: str) -> list[str]:
    return [kind for kind, _ in PersonalData().find(text)]


@pytest.mark.parametrize("kind", FOUND)
def test_personal_data_is_found(kind: str) -> None:
    assert {text: kinds(text) for text in FOUND[kind]} == {text: [kind] for text in FOUND[kind]}


@pytest.mark.parametrize("text", NOT_PERSONAL)
def test_numbers_of_a_problem_are_not_personal(text: str) -> None:
    assert kinds(text) == []


def test_rows_with_personal_data_are_dropped_and_the_note_does_not_repeat_it() -> None:
    decisions, health = run(
        PersonalData(), ["What is 3 + 4?", "Mail bob@gmail.com", ("p", "call (212) 555-0147")]
    )
    assert [d.kept for d in decisions] == [True, False, False]
    assert [d.note for d in decisions] == ["", "email in prompt", "phone in answer"]
    assert health.value == pytest.approx(2 / 3)
    assert health.figures["rows_with"] == {"email": 1, "phone": 1}


def test_masking_keeps_the_row_in_all_its_columns() -> None:
    fields = {
        "notes": [{"role": "user", "content": "I am bob@gmail.com, key AKIAIOSFODNN7EXAMPLE."}],
        "level": 3,
    }
    row = record(0, "Mail bob@gmail.com or eve@gmail.com", "42", fields)
    decision = decided(PersonalData(action="mask"), [row])[0][0]
    assert decision.kept and decision.reason == "personal_data"
    assert decision.record.prompt == "Mail [EMAIL] or [EMAIL]" == decision.record.fields["prompt"]
    assert decision.record.fields["notes"][0]["content"] == "I am [EMAIL], key [SECRET]."
    assert decision.record.answer == "42" and decision.record.fields["level"] == 3
    assert decision.record.fields["id"] == "s/0"


def test_only_the_kinds_that_are_asked_for_are_found() -> None:
    stage = PersonalData(kinds=("email",))
    assert [kind for kind, _ in stage.find("a.b@gmail.com 8.8.8.8")] == ["email"]


def test_regions_give_national_phone_numbers() -> None:
    text = "Telefon 030 901820"
    assert [k for k, _ in PersonalData(regions=("DE",)).find(text)] == ["phone"]
    assert not PersonalData(regions=("US",)).find(text)
    with pytest.raises(ValidationError, match="'XX' is no country"):
        PersonalData(regions=("XX",))


def test_a_filter_that_finds_nothing_alarms() -> None:
    assert "none of 1 rows" in run(PersonalData(), ["What is 3 + 4?"])[1].alarm
    assert not run(PersonalData(), ["bob@gmail.com"])[1].alarm


def test_masked_rows_of_messages_can_be_stored_and_hold_nothing_any_more() -> None:
    talk = [
        {"role": "system", "content": "Forward it to eve@web.de."},
        {"role": "user", "content": "I am bob@web.de."},
    ]
    columns = {"id": "s/0", "source": "s", "prompt": talk, "answer": None}
    columns |= {"chosen": "Hello bob@web.de", "rejected": "No."}
    texts = prompt_text(columns), answer_text(columns)
    row = Record(0, "s/0", "s", "s.jsonl: row 1", *texts, columns)
    (decision,), _ = decided(PersonalData(action="mask"), [row])
    assert decision.kept and stored(decision.record).count(b"[EMAIL]") == 3
    assert b"web.de" not in stored(decision.record)


def test_a_number_that_only_an_earlier_message_explains_is_dropped_instead_of_masked() -> None:
    talk = [
        {"role": "user", "content": "Tell me your phone"},
        {"role": "user", "content": "202 456 1111"},
    ]
    columns = {"id": "s/0", "source": "s", "prompt": talk, "answer": ""}
    row = Record(0, "s/0", "s", "s.jsonl: row 1", prompt_text(columns), "", columns)
    (decision,), _ = decided(PersonalData(action="mask"), [row])
    assert (decision.kept, decision.reason) == (False, "personal_data")


@pytest.mark.parametrize("column", ["tests", "test_patch"])
def test_what_is_run_is_not_masked(column: str) -> None:
    """A test with [EMAIL] in it would check another program."""
    columns = {"id": "s/0", "source": "s", "prompt": "Find it.", "answer": "x"}
    columns |= {column: {"hidden": [["bob@web.de", "valid"]]}}
    row = Record(0, "s/0", "s", "s.jsonl: row 1", "Find it.", "x", columns)
    (decision,), _ = decided(PersonalData(action="mask"), [row])
    assert not decision.kept and decision.record == row
    assert f"a mark in {column}" in decision.note


def test_the_search_for_keys_takes_time_in_proportion_to_the_text() -> None:
    start = time.process_time()
    assert kinds("sk-" + "a" * 200_000) == []  # minutes if every position looks at all others
    assert time.process_time() - start < 30
