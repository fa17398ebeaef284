"""Where the steps of a solution end."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from sixfold.errors import UserError
from sixfold.steps import _PATTERNS, last_tokens, named_steps, own_ends_of, steps_of, tokenized_ends

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


def byte_fallback() -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """encode and decode of a tokenizer as Llama 2's: unknown characters become their bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "\n"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return lambda text: list(tokenizer.encode(text).ids), lambda ids: str(
        tokenizer.decode(list(ids))
    )


def test_bytes_of_a_character_are_no_characters() -> None:
    encode, decode = byte_fallback()
    ends = tokenized_ends("a€b", encode, decode)
    assert ends == [1, 1, 1, 2, 3]
    text = "a€b a😀é b"
    ends = tokenized_ends(text, encode, decode)
    assert ends == sorted(ends) and ends[-1] == len(text)
    assert ends == slow_ends(text, encode(text), decode)
    steps = steps_of("every:1", lambda text: tokenized_ends(text, encode, decode)).ends(text)
    assert [text[a:b] for a, b in pairwise([0, *steps])] == ["a", "€", "b", " a", "😀", "é ", "b"]


def slow_ends(
    text: str, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """By all beginnings of the tokens, each decoded by itself."""
    shown = [decode(tokens[: n + 1]) for n in range(len(tokens))]
    most = [max(end for end in range(len(text) + 1) if one.startswith(text[:end])) for one in shown]
    return [max(most[: n + 1]) for n in range(len(most))]


def test_pieces_end_where_whole_texts_end() -> None:
    draw = random.Random(1)
    encode, decode = byte_fallback()
    for _ in range(200):
        text = "".join(draw.choice("ab €😀é\n") for _ in range(draw.randrange(1, 12)))
        tokens = encode(text)
        shown = decode(tokens)
        slow = slow_ends(shown, tokens, decode)
        assert tokenized_ends(shown, lambda _, ids=tokens: ids, decode) == slow
        found = last_tokens(range(1, len(shown) + 1), shown, tokens, decode)
        assert found == [min(n for n, at in enumerate(slow) if at > end) for end in range(slow[-1])]
        wild = [draw.randrange(262) for _ in range(draw.randrange(1, 12))]  # parts of characters
        ends = tokenized_ends(decode(wild), lambda _, ids=wild: ids, decode)
        assert ends == sorted(ends) and ends[-1] == len(decode(wild))


def test_a_long_text_is_decoded_in_pieces() -> None:
    encode, decode = byte_fallback()
    tokens = encode("a €\n" * 500)
    asked = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal asked
        asked += len(ids)
        return decode(ids)

    text = decode(tokens)
    last_tokens(range(1, len(text) + 1), text, tokens, counted)
    assert asked < 12 * len(tokens)


def test_a_row_of_signs_is_searched_once() -> None:
    sign = steps_of("sentence").ends
    assert sign("!" * 9 + " a") == [9, 11] and sign("a!!") == [3] and sign('a.)". b') == [5, 7]
    assert not re.compile(_PATTERNS["sentence"]).match("!!! ", 1)


def test_a_model_names_no_code() -> None:
    for ends in ("newline", "token:x", "xml:step", "every:3"):
        assert named_steps(ends, "S") == ends
    for ends in ("os:system", "own.py:f", "", "newlin", 3, ["newline"], None):
        with pytest.raises(UserError, match=r"no code.* Set S to where"):
            named_steps(ends, "S")


def test_a_function_of_the_user_has_a_fingerprint() -> None:
    assert own_ends_of("own.py:halves") == ["own.py:halves"]
    assert not any(map(own_ends_of, ("", "newline", "token:a.py:b", "every:3")))
