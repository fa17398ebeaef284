"""Where the steps of a solution end."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.steps import last_tokens, steps_of

OWN = """\
def halves(text):
    return [len(text) // 2, len(text)]

def backwards(text):
    return [3, 2]

def beyond(text):
    return [len(text) + 1]

def failing(text):
    raise KeyError("x")

def nothing(text):
    return None
"""


def divided(name: str, text: str) -> list[str]:
    """The steps as texts."""
    ends = steps_of(name, lambda text: range(1, len(text) + 1)).ends(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_steps_of_awkward_texts() -> None:
    for name, text, steps in (
        ("newline", "", []),
        ("newline", "no end", ["no end"]),
        ("newline", "a\nb", ["a\n", "b"]),
        ("newline", "a\nb\n", ["a\n", "b\n"]),
        ("newline", "a\n \n\nb\n\n", ["a\n \n\n", "b\n\n"]),
        ("newline", "\n\na\nb", ["\n\na\n", "b"]),
        ("newline", " \n", [" \n"]),
        ("newline", "é€\n\U0001f600\nz", ["é€\n", "\U0001f600\n", "z"]),
        ("blank_line", "a\nb\n \n\nc\n\n", ["a\nb\n \n\n", "c\n\n"]),
        ("sentence", 'It is 3.5. "Yes!" So?', ["It is 3.5.", ' "Yes!"', " So?"]),
        ("sentence", "一。二！", ["一。", "二！"]),
        ("token: ки", "a ки\nb ки", ["a ки", "\nb ки"]),
        ("token:.", "a.b.", ["a.", "b."]),
        ("xml:step", "<step>a</step>\n<step>b</step>\n", ["<step>a</step>", "\n<step>b</step>\n"]),
        ("every:2", "abcde", ["ab", "cd", "e"]),
        ("every:9", "abcde", ["abcde"]),
    ):
        assert divided(name, text) == steps, (name, text)


def test_steps_cover_the_text_and_none_is_blank() -> None:
    draw = random.Random(0)
    for name in ("newline", "blank_line", "sentence", "token:a", "every:3"):
        for _ in range(200):
            text = "".join(draw.choice("a\n .\u00a0é") for _ in range(draw.randrange(12)))
            steps = divided(name, text)
            assert "".join(steps) == text
            assert all(step.strip() for step in steps) or not text.strip()
            assert len(steps) <= 1 or text.strip()


def test_a_function_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert divided("own.py:halves", "abcd") == ["ab", "cd"]
    for name, message in (
        ("backwards", "must increase, from 1 to 4"),
        ("beyond", "must increase, from 1 to 4"),
        ("failing", "the function failed: KeyError"),
        ("nothing", "the function failed: TypeError"),
    ):
        with pytest.raises(UserError, match=rf"steps 'own.py:{name}': .*{message}"):
            divided(f"own.py:{name}", "abcd")


def test_unknown_ways_name_the_nearest() -> None:
    for name, message in (
        ("newlin", "Use newline, blank_line, .* 'newline'"),
        ("", "unknown way to end steps ''"),
        ("tokn:x", "'token'"),
        ("token:", "token:TEXT needs the text"),
        ("xml:<step>", "without brackets"),
        ("every:0", "at least 1"),
        ("every:x", "at least 1"),
        ("missing.py:f", "file not found"),
    ):
        with pytest.raises(UserError, match=message):
            steps_of(name, lambda text: [])
    with pytest.raises(UserError, match="no tokenizer"):
        steps_of("every:2")


def test_a_step_is_read_at_the_token_with_its_last_character() -> None:
    text, pieces = "ab\ncd\n\nef", ["a", "b\nc", "d\n", "\n", "ef"]
    ends = steps_of("newline").ends(text)
    found = last_tokens(ends, text, range(5), lambda ids: "".join(pieces[i] for i in ids))
    slow = [
        next(k for k in range(5) if len("".join(pieces[: k + 1])) >= end)
        for end in (m.end() for m in re.finditer(r"\n+|.$", text))
    ]
    assert found == slow == [1, 3, 4]
    with pytest.raises(ValueError, match="the text differs"):
        last_tokens([9], text, range(4), lambda ids: "".join(pieces[i] for i in ids))
