"""The model from nothing: every character has its token, and the seed alone decides the weights."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sixfold.errors import UserError
from sixfold.model.loading import load_policy, vocabulary_hash
from sixfold.model.scratch import SPECIAL, character_tokenizer, scratch_model, trained_tokenizer
from sixfold.recipe.schema import ModelConfig, ScratchConfig

CONTROL = "<>#{}=;_"
"""Characters that formats of tasks and traces are built from."""


@pytest.mark.parametrize(
    "alphabet", [ScratchConfig().alphabet, CONTROL + "01 \n\t", "aA\u00e9\u4e2d\U0001f600|<>\\\"'"]
)
def test_every_character_is_one_token_and_comes_back(alphabet: str) -> None:
    tokenizer = character_tokenizer(alphabet)
    for text in (alphabet, alphabet[::-1], *alphabet, f" {alphabet} ", alphabet[:2] * 3):
        if set(text) <= set(alphabet):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text) and min(ids) >= len(SPECIAL)
            assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == len(SPECIAL) + len(alphabet)


def test_characters_outside_the_alphabet_are_unknown_one_by_one() -> None:
    tokenizer = character_tokenizer("ab")
    assert tokenizer("aXXb")["input_ids"] == [6, tokenizer.unk_token_id, tokenizer.unk_token_id, 7]


@pytest.mark.parametrize(
    ("alphabet", "words"), [("abca", r"repeated characters: \['a'\]"), ("", "empty")]
)
def test_an_alphabet_with_repeats_or_nothing_is_refused(alphabet: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        character_tokenizer(alphabet)


def test_the_vocabulary_hash_tells_tokenizers_apart() -> None:
    first = vocabulary_hash(character_tokenizer("abc"))
    assert vocabulary_hash(character_tokenizer("abc")) == first
    others = [vocabulary_hash(character_tokenizer(a)) for a in ("acb", "abcd", "ab", "abC")]
    assert len({first, *others}) == 5
    grown = character_tokenizer("abc")
    grown.add_tokens(["d"])
    assert vocabulary_hash(grown) != first


def test_weights_come_from_the_seed_and_nothing_else() -> None:
    sizes = ScratchConfig(
        hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
    )
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first, _ = scratch_model(sizes, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's own noise is untouched
    torch.manual_seed(456)
    again, other = scratch_model(sizes, seed=1)[0], scratch_model(sizes, seed=2)[0]
    for name, p in first.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_the_spread_of_the_weights_and_the_rotary_base_are_as_asked() -> None:
    sizes = ScratchConfig(layers=1, initializer_range=0.05, rope_theta=100.0)
    model, _ = scratch_model(sizes, seed=0)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
    frequencies = 100.0 ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(model.model.rotary_emb.inv_freq, frequencies)


def test_the_end_token_is_the_models_too() -> None:
    model, tokenizer = scratch_model(
        ScratchConfig(
            hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
        ),
        seed=0,
    )
    assert (
        model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    )
    assert model.config.vocab_size == len(tokenizer)


CALL = '<tool_call>{"name": "sql", "arguments": {"query": "'
TOOLS = [{"type": "function", "function": {"name": "sql", "parameters": {}}}]


def test_a_word_is_one_token_and_the_longest_wins() -> None:
    """The slow way: at each place, the longest word that fits, otherwise one character."""
    alphabet, words = (
        ScratchConfig().alphabet + 'sqS_[]{}"',
        ("tool", CALL, "sel", "select ", "ect"),
    )
    alphabet = "".join(dict.fromkeys(alphabet))
    tokenizer = character_tokenizer(alphabet, words)
    for text in (f"{CALL}select tools", "selselect x", "aselectool", CALL[:-1] + "select"):
        pieces, at = [], 0
        while at < len(text):
            fits = [word for word in (*words, text[at]) if text.startswith(word, at)]
            pieces.append(max(fits, key=len))
            at += len(pieces[-1])
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == pieces
        assert tokenizer.decode(ids) == text


def test_without_words_the_model_is_the_one_it_was() -> None:
    """Hashes of the vocabulary, the template and the weights before words existed."""
    sizes = ScratchConfig(
        hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
    )
    model, tokenizer = scratch_model(sizes, seed=1)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    found = [
        vocabulary_hash(tokenizer),
        *(sha256(data).hexdigest() for data in (tokenizer.chat_template.encode(), weights)),
    ]
    assert [one[:16] for one in found] == [
        "bd741696ed56a1b4",
        "82ba7ef60f131370",
        "bc8e8556ae91c6d1",
    ]


def test_with_words_the_template_has_tools() -> None:
    sizes = ScratchConfig(alphabet="sql2", words=(CALL, "tool"), layers=1)
    _, tokenizer = scratch_model(sizes, seed=1)
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "s"},
        {"role": "tool", "content": "tool2"},
    ]
    ids = tokenizer.apply_chat_template(turns, tools=TOOLS, add_generation_prompt=True)
    assert tokenizer.convert_ids_to_tokens(ids["input_ids"]) == [
        *("<|tool|>", *"sql", "<|user|>", "q", "<|assistant|>", "s", "<|end|>"),
        *("<|tool|>", "tool", "2", "<|assistant|>"),
    ]
    assert len(tokenizer) == len(SPECIAL) + 4 + 2 + 1


@pytest.mark.parametrize("words", [["ab", "ab"], ["a"], ["x<|end|>"], ["<|tool|>"]])
def test_words_that_cannot_be_tokens_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"words"):
        ScratchConfig(words=tuple(words))


def _texts(seed: int) -> list[str]:
    """Documents of 300 made-up words, in an order that `seed` decides."""
    words = random.Random(0)
    known = [
        "".join(words.choices("abcdefgh\u00e9\u4e2d", k=words.randint(2, 7))) for _ in range(300)
    ]
    texts = [" ".join(words.choices(known, k=60)) for _ in range(100)]
    random.Random(seed).shuffle(texts)
    return texts


def test_a_trained_tokenizer_depends_on_the_texts_and_not_on_their_order() -> None:
    first, again = (trained_tokenizer(_texts(seed), 400) for seed in (1, 2))
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert len(first) == 400 and first.get_vocab()["<|end|>"] == SPECIAL.index("<|end|>")
    other = trained_tokenizer([text.replace("a", "z") for text in _texts(1)], 400)
    assert vocabulary_hash(other) != vocabulary_hash(first)


def test_the_first_merges_are_the_most_frequent_pairs() -> None:
    """By hand: the pair a-b occurs 5 times; then (space)-ab 4 times, and ab-c 3 times."""
    tokenizer = trained_tokenizer(["abc abc abc ab ab x x"], len(SPECIAL) + 256 + 2)
    assert tokenizer.convert_ids_to_tokens([262, 263]) == ["ab", "\u0120ab"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"]) == ["ab"]


@pytest.mark.parametrize(
    "text", [CONTROL, " \n\t\x00\x1f", "\U0001f600\u4e2d\u0301", "<|end|><|user|>"]
)
def test_every_text_comes_back_from_a_trained_tokenizer_after_saving(
    text: str, tmp_path: Path
) -> None:
    """Characters that the training texts lack included: each is one to four bytes."""
    made = trained_tokenizer(_texts(1), 300)
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(text, split_special_tokens=True)["input_ids"]
    assert loaded.decode(ids) == text and min(ids) >= len(SPECIAL)
    assert ids == made(text, split_special_tokens=True)["input_ids"]
    assert loaded.chat_template == made.chat_template
    assert loaded.eos_token_id == made.eos_token_id == SPECIAL.index("<|end|>")


def test_a_vocabulary_that_the_texts_cannot_fill_is_refused_with_the_most_that_they_give() -> None:
    with pytest.raises(UserError, match=r"model\.scratch\.vocabulary = 300.* 264 "):
        trained_tokenizer(["abc"], 300)  # a-b, ab-c
    assert len(trained_tokenizer(["abc"], 264)) == 264


def test_a_model_with_a_trained_tokenizer_has_an_embedding_for_each_of_its_tokens() -> None:
    sizes = ScratchConfig(tokenizer="trained", vocabulary=320, layers=1)
    model, tokenizer = scratch_model(sizes, 0, iter(_texts(1)))
    assert model.config.vocab_size == len(tokenizer) == 320
    with pytest.raises(UserError, match="kind 'pretrain'"):
        scratch_model(sizes, 0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokenizer": "trained", "alphabet": "ab"}, "alphabet"),
        ({"tokenizer": "trained", "words": ("ab",)}, "words"),
        ({"vocabulary": 300}, "vocabulary"),
        ({"tokenizer": "trained", "vocabulary": 261}, "vocabulary"),
    ],
)
def test_settings_of_the_other_tokenizer_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){named}.*(no effect|262)"):
        ScratchConfig(**settings)


def test_a_policy_keeps_its_trained_tokenizer_in_its_folder(tmp_path: Path) -> None:
    sizes = ScratchConfig(
        tokenizer="trained", vocabulary=320, layers=1, hidden_size=16, heads=2, kv_heads=1
    )
    policy = load_policy(ModelConfig(scratch=sizes), seed=0, device="cpu", texts=_texts(1))
    policy.save(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path)), seed=0, device="cpu")
    assert loaded.vocabulary_hash == policy.vocabulary_hash
    assert loaded.vocabulary_hash == vocabulary_hash(trained_tokenizer(_texts(1), 320))
    assert loaded.stop_token_ids == policy.stop_token_ids == (SPECIAL.index("<|end|>"),)
