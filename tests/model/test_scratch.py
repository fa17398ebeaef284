"""The model from nothing: every character has its token, and the seed alone decides the weights."""

from __future__ import annotations

import pytest
import torch

from sixfold.errors import UserError
from sixfold.model.loading import vocabulary_hash
from sixfold.model.scratch import SPECIAL, character_tokenizer, scratch_model
from sixfold.recipe.schema import ScratchConfig

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
