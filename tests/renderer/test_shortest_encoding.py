"""The number of characters bounds the number of tokens from below, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.shortest_encoding import ShortestEncoding, keeps_characters

TEXTS = ["hello there  hello", "가나다 각", "ガガ é", "aaaa bbbb      ", "<|x|>"] * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Like sentencepiece: NFKC, blanks joined, and one token for all unknown characters."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁"), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False),
    )
    return tokenizer


def fast(tokenizer: Tokenizer, **roles: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


TOKENIZERS = {
    "bytes": fast(byte_level()),
    "word pieces": fast(word_piece(), unk_token="<unk>"),
    "characters": character_tokenizer("abc 가나"),
}
WRITTEN = st.lists(
    st.sampled_from(
        [
            *"helo abc é가나ガ!",
            "  ",
            "\u1100\u1161\u11a8",
            "e\u0301",
            "ｶﾞ",
            "\x00",
            "\u200b",
            "😀",
            "hello",
        ]
    ),
    max_size=60,
)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=WRITTEN)
def test_no_text_has_fewer_tokens(name: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert keeps_characters(tokenizer)
    # A text with unknown characters is refused.
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
        assert ShortestEncoding(tokenizer).tokens(text) <= len(ids)


def test_the_bound_is_characters_divided_by_the_longest_token() -> None:
    tokenizer = fast(byte_level())
    longest = max(map(len, tokenizer.get_vocab()))
    bound = ShortestEncoding(tokenizer)
    assert [
        bound.tokens(text) for text in ("", "a" * longest, "a" * longest + "b", " " * 1000)
    ] == [0, 1, 2, 0]
    assert bound.tokens("가" * 3 * longest) == 1


def test_tokenizers_that_may_drop_text_have_no_bound() -> None:
    assert not keeps_characters(fast(unigram(), unk_token="<unk>"))  # it replaces a pattern
    removed, lost = byte_level(), Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), removed.pre_tokenizer]
    )
    assert not keeps_characters(fast(removed))
    assert not keeps_characters(fast(lost)) and len(fast(lost)("xxxa")["input_ids"]) == 1
    assert ShortestEncoding(fast(lost)).tokens("x" * 1000) == 0
