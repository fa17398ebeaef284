"""Incremental text does not depend on how it is split.

Cases: characters of several bytes, stop strings, and tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sixfold.renderer.call_formats import HERMES
from sixfold.renderer.text_stream import StopStrings, TextStream
from sixfold.types import ToolCall


def byte_tokenizer() -> Tokenizer:
    """Byte-level tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token=alphabet[0])
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(at)]


@given(st.lists(st.integers(0, 255), max_size=300), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_bytes_decoded_in_pieces_equal_bytes_decoded_at_once(tokens: list[int], step: int) -> None:
    stream = TextStream(lambda ids: BYTES.decode(list(ids)))
    given_out = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    assert "".join(given_out) + stream.finish() == BYTES.decode(tokens)


TEXT = "aé你🙂" + "你🙂" * 60 + "é~" * 40


def byte_level(text: str) -> tuple[Tokenizer, list[int]]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return BYTES, [BYTES.token_to_id(c) for c in split.pre_tokenize_str(text)[0][0]]


def byte_fallback(text: str) -> tuple[Tokenizer, list[int]]:
    """One token per byte. A run of bytes decodes to replacement characters until it is complete."""
    tokenizer = Tokenizer(
        models.WordLevel({f"<0x{i:02X}>": i for i in range(256)}, unk_token="<0x00>")
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, list(text.encode())


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_only_an_incomplete_character_is_held_back(
    kind: Callable[[str], tuple[Tokenizer, list[int]]],
) -> None:
    tokenizer, tokens = kind(TEXT)
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
    seen, longest = "", 0
    for i, token in enumerate(tokens):
        seen += stream.push([token])
        assert seen == TEXT.encode()[: i + 1].decode(errors="ignore"), (
            "all complete characters, and no part of one"
        )
        longest = max(longest, len(stream._window))
    assert seen == TEXT and stream.finish() == ""
    assert longest < 100, "the window does not grow with the text"


def test_character_after_invalid_bytes_is_decoded_whole() -> None:
    """Invalid bytes are not held back forever, and the next character is not split."""
    tokenizer, smile = byte_level("🙂")
    tokens = [BYTES.token_to_id("ÿ")] * 40 + smile  # 0xFF is in no character
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
    given_out = [stream.push([token]) for token in tokens]
    assert "".join(given_out) == "\ufffd" * 40 + "🙂"
    assert len("".join(given_out[:40])) > 30


def stopped(text: str, stops: list[str], cuts: list[int]) -> tuple[str, bool]:
    cutter, out = StopStrings(stops), ""
    for piece in pieces(text, cuts):
        new, hit = cutter.push(piece)
        out += new
        if hit:
            return out, True
    return out + cutter.finish(), False


@pytest.mark.slow
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=20),
)
@settings(max_examples=200)
def test_the_first_complete_stop_string_cuts_the_text_for_any_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """Compare with a slow method: the first prefix of the text that ends with a stop string."""
    ends = (
        (n, s)
        for n in range(len(text) + 1)
        for s in sorted(stops, key=len, reverse=True)
        if text[:n].endswith(s)
    )
    n, stop = next(ends, (0, ""))
    expected = (text[: n - len(stop)], True) if stop else (text, False)
    assert stopped(text, stops, cuts) == expected


def test_text_waits_only_while_it_may_become_a_stop_string() -> None:
    cutter = StopStrings(["END"])
    assert [cutter.push(c)[0] for c in "aENxEEN"] == ["a", "", "", "ENx", "", "E", ""]
    assert cutter.push("D") == ("", True)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1, "b": "é"}')
CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("plain <tool", "plain <tool", []),
    ("trailing space \n", "trailing space \n", []),
    (CALL, "", [ADD]),
    (f"let me see\n{CALL}\n{CALL}\n", "let me see", [ADD, ADD]),
    (f"{CALL} then text ", " then text", [ADD]),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ('x <tool_call>{"name": 3}</tool_call>', 'x <tool_call>{"name": 3}</tool_call>', []),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
    ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    (
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        [],
    ),
]


@pytest.mark.parametrize(("said", "text", "calls"), CASES, ids=range(len(CASES)))
def test_calls_and_text_do_not_depend_on_the_split(
    said: str, text: str, calls: list[ToolCall]
) -> None:
    for size in (1, 2, 7, len(said)) if len(said) < 1000 else (len(said),):
        parser = HERMES.parser()
        found = [
            item for i in range(0, len(said), size) for item in parser.push(said[i : i + size])
        ] + parser.finish()
        assert [item for item in found if isinstance(item, ToolCall)] == calls
        assert "".join(item for item in found if isinstance(item, str)) == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
