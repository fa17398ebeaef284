"""Windows of texts: shifted targets, held-out text that is never seen, documents that do not attend
to each other, and a loss below the entropy of single tokens.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.batch import collate, number
from sixfold.data.texts import Document, TextSet, load_texts
from sixfold.errors import UserError
from sixfold.model.loading import use_own_kernels
from sixfold.model.scratch import character_tokenizer, scratch_model, trained_tokenizer
from sixfold.recipe.schema import DataConfig, PretrainConfig, ScratchConfig, TrainerConfig
from sixfold.renderer.renderer import Renderer
from sixfold.stages.pretrain_examples import PretrainExamples, bits_per_byte, unigram_entropy
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.sft import SupervisedLoss
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group
from tests.made_trajectories import from_mask

torch.set_num_threads(1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TINY = ScratchConfig(
    alphabet=LETTERS + " ",
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    context=32,
    initializer_range=0.2,
)
END = 1


class Examples(Protocol):
    """What a supervised stage trains on."""

    heldout: Sequence[Group]
    notes: list[str]

    def groups(self, step: int) -> list[Group]: ...


def text_set(train: Sequence[str], heldout: Sequence[str] = ()) -> TextSet:
    documents = [
        [Document(str(i), text) for i, text in enumerate(part)] for part in (train, heldout)
    ]
    return TextSet(*documents)


def made(
    train: Sequence[str],
    heldout: Sequence[str] = (),
    *,
    renderer: Renderer | None = None,
    seed: int = 0,
    **config: Any,
) -> PretrainExamples:
    return PretrainExamples(
        text_set(train, heldout),
        PretrainConfig(**{"window": 8, "examples_per_step": 4} | config),
        renderer or Renderer(character_tokenizer(TINY.alphabet)),
        context=TINY.context,
        seed=seed,
    )


def windows(groups: Sequence[Group]) -> list[list[int]]:
    return [t.tokens for group in groups for t in group.trajectories]


def letters(text: str) -> list[int]:
    """Token ids by hand: six special tokens, then the alphabet. A bar is the end of a text."""
    return [END if c == "|" else 6 + TINY.alphabet.index(c) for c in text]


def tiny_model() -> PreTrainedModel:
    model, _ = scratch_model(TINY, 0)
    use_own_kernels(model)
    return model.eval()


def logp_alone(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Log-probs [T - 1] of tokens 1, 2, ... by the attention of transformers, without batch."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    use_own_kernels(model)
    return -torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


def test_windows_are_parts_of_the_documents_joined_by_end_tokens() -> None:
    examples: Examples = made(["abcdefgh", "ij", "klmnopqrstuvw"], window=7, examples_per_step=5)
    stream = letters("abcdefgh|ij|klmnopqrstuvw|")
    parts = [stream[at : at + 7] for at in range(len(stream) - 6)]
    drawn = [windows(examples.groups(step)) for step in range(1, 41)]
    assert {len(step) for step in drawn} == {5}
    assert all(window in parts for step in drawn for window in step)
    seen = {tuple(window) for step in drawn for window in step}
    assert seen == set(map(tuple, parts))  # both ends included, with 200 draws of 20 parts
    for group in examples.groups(1):
        (trajectory,) = group.trajectories
        assert trajectory.provenance == "pssssss"


def test_the_loss_is_the_cross_entropy_of_each_token_given_those_before_it() -> None:
    """Textbook form: logits of the inputs x[:-1] against the targets x[1:], mean over all."""
    model = tiny_model()
    groups = made(["the cat sat on the mat"]).groups(1)
    batch = SupervisedLoss().prepare(collate(groups))
    logp = score_batch(model, batch, Scoring(), 4096, True)
    found = SupervisedLoss().compute_loss(batch, logp).loss
    x = torch.tensor(windows(groups))
    assert x.shape == (4, 8)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=x[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(found, expected)


def test_the_windows_of_a_step_depend_on_seed_and_step_alone() -> None:
    texts = [LETTERS * 9, "another text " * 5, "z" * 31]
    for form in ("windows", "documents"):
        used, fresh = (made(texts, form=form, examples_per_step=2) for _ in range(2))
        in_order = {step: windows(used.groups(step)) for step in range(1, 9)}
        for step in (7, 3, 8, 1):
            assert windows(fresh.groups(step)) == in_order[step]
        assert len(set(map(str, in_order.values()))) == len(in_order)
        other = made(texts, form=form, examples_per_step=2, seed=1)
        assert windows(other.groups(1)) != in_order[1]


@pytest.mark.parametrize("form", ["windows", "documents"])
def test_no_training_window_has_a_held_out_token(form: str) -> None:
    examples = made(["abcde" * 7, "edcba" * 3], ["vwxyz" * 6, "zyx"], form=form)
    for step in range(1, 30):
        assert {i for w in windows(examples.groups(step)) for i in w} <= {*letters("abcde|")}
    assert {i for w in windows(examples.heldout) for i in w} == {*letters("vwxyz|")}


@pytest.mark.parametrize("form", ["windows", "documents"])
def test_held_out_windows_predict_each_token_once(form: str) -> None:
    texts = ["vwxyz" * 6, "zyx"]
    found = windows(made([LETTERS * 2], texts, form=form).heldout)
    streams = (
        [letters("|".join([*texts, ""]))]
        if form == "windows"
        else [letters(t + "|") for t in texts]
    )
    assert [i for w in found for i in w[1:]] == [i for s in streams for i in s[1:]]
    assert max(map(len, found)) == 8
    assert found[0] == streams[0][:8] and found[1] == streams[0][7:15]


def test_documents_are_whole_or_cut_at_the_window_and_none_is_left_out() -> None:
    texts = ["a" * 3, "b" * 20, "c" * 7, *(c * 2 for c in "defghijkl")]
    examples = made(texts, form="documents", examples_per_step=1)
    pieces = [["a" * 3 + "|"], ["b" * 8, "b" * 8, "b" * 6 + "|"], ["c" * 7 + "|"]]
    pieces += [[c * 2 + "|"] for c in "defghijkl"]
    expected = Counter(tuple(letters(p)) for parts in pieces for p in parts)
    steps, seen = 0, Counter[tuple[int, ...]]()
    while seen.total() < expected.total():
        steps += 1
        found = windows(examples.groups(steps))
        assert sum(map(len, found)) <= 8  # what one window holds
        seen.update(map(tuple, found))
    assert seen == expected  # an epoch has every piece once
    fewest = -(-sum(map(len, expected.elements())) // 8)
    assert fewest <= steps < expected.total(), "several short documents share a window"


def test_a_document_has_the_log_probs_that_it_has_alone() -> None:
    """The trainer packs all documents of a step into one row."""
    model = tiny_model()
    texts = ["the cat", "a dog and a cat", "xyz", "on the mat"]
    groups = made(texts, form="documents", window=24, examples_per_step=2).groups(1)
    together = score_batch(model, collate(groups), Scoring(), 4096, True)
    found = {tuple(w): together[b, 1 : len(w)] for b, w in enumerate(windows(groups))}
    assert sorted(found) == sorted(tuple(letters(text + "|")) for text in texts)
    for tokens, logp in found.items():
        torch.testing.assert_close(logp, logp_alone(model, [*tokens]), atol=1e-5, rtol=1e-5)
    whole = logp_alone(model, [i for tokens in found for i in tokens])
    apart = torch.cat([*found.values()])
    assert len(whole) == len(apart) + len(found) - 1  # attending to others would change them:
    last = [*found.values()][-1]
    assert (whole[-len(last) :] - last).abs().max() > 1e-2


def test_few_documents_are_all_in_every_step_and_a_note_says_so() -> None:
    examples = made(["abc", "def"], form="documents", examples_per_step=9)
    expected = sorted(letters(text) for text in ("abc|", "def|"))
    assert sorted(windows(examples.groups(1))) == sorted(windows(examples.groups(5))) == expected
    note, _ = examples.notes  # and the unigram entropy
    assert "pretrain.examples_per_step = 9" in note and " 1 windows" in note


def test_the_unigram_entropy_is_that_of_the_training_tokens() -> None:
    examples = made(["aab" * 5, "c" * 14], ["xyz" * 9])
    shares = [n / 31 for n in (10, 5, 14, 2)]  # a, b, c, and the ends of two texts
    assert examples.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert unigram_entropy(torch.arange(5).numpy()) == pytest.approx(math.log(5))


MULTIBYTE = "na\u00efve \u4e2d\u6587 \U0001f600 \u00fcber! " * 3


@pytest.mark.parametrize("kind", ["characters", "trained"])
def test_bits_per_byte_count_the_bytes_of_what_is_predicted(kind: str) -> None:
    """A model that finds all tokens equally likely: log2 V bits per token."""
    tokenizer = (
        character_tokenizer("".join(dict.fromkeys(MULTIBYTE)))
        if kind == "characters"
        else trained_tokenizer(["other words, \u00fc\u4e2d and \u4e2d again"], 270)
    )
    renderer = Renderer(tokenizer)
    examples = made([MULTIBYTE], [MULTIBYTE, MULTIBYTE], renderer=renderer)
    first = len(b"n")  # read, but not predicted
    size = examples.text_bytes(examples.heldout)
    assert size == 2 * len(MULTIBYTE.encode()) - first  # and the end tokens have no bytes
    tokens = 2 * (len(tokenizer(MULTIBYTE)["input_ids"]) + 1) - 1
    assert sum(len(w) - 1 for w in windows(examples.heldout)) == tokens
    nats = tokens * math.log(len(tokenizer))
    assert bits_per_byte(nats, size) == pytest.approx(tokens * math.log2(len(tokenizer)) / size)
    part = examples.heldout[1:3]
    shown = b"".join(renderer.token_bytes(i) for w in windows(part) for i in w[1:] if i != END)
    assert examples.text_bytes(part) == len(shown) > 0
    assert shown in (MULTIBYTE * 2).encode()


def task_texts(data: DataConfig) -> TextSet:
    return load_texts(data, "text", seed=0)


def test_a_task_is_its_prompt_and_its_worked_solution() -> None:
    texts = task_texts(DataConfig(source="arithmetic", limit=12, heldout=3))
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    config = PretrainConfig(form="documents", window=128, examples_per_step=50)
    examples = PretrainExamples(texts, config, renderer, context=128, seed=0)
    shown = [renderer.shown(w) for w in windows(examples.groups(1))]
    expected = [
        f"<|user|>{one.task.prompt}<|assistant|>{one.task.trace}<|end|>"
        for one in texts.train
        if one.task
    ]
    assert sorted(shown) == sorted(expected) and len(shown) == 9
    assert len(examples.heldout) == 3


def test_an_episode_is_played() -> None:
    texts = task_texts(DataConfig(source="calculator", limit=4, heldout=0))
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    config = PretrainConfig(form="documents", window=16, examples_per_step=50)

    def play(task: Any) -> Any:
        return from_mask(task.id, 0, [7, 8, len(task.id), END], 1, [False, True, False, True])

    examples = PretrainExamples(texts, config, renderer, context=16, seed=0, play=play)
    assert sorted(windows(examples.groups(1))) == sorted(
        [7, 8, len(one.id), END] for one in texts.train
    )
    with pytest.raises(UserError, match=r"several replies.*environment\.episode"):
        PretrainExamples(texts, config, renderer, context=16, seed=0)


def test_what_cannot_be_trained_on_is_refused_in_one_line() -> None:
    def refusal(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(UserError) as caught:
            made(*args, **kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    said = refusal(["abcde"], window=8)
    assert " 6 tokens" in said and "window of 8" in said and "at most 6" in said
    assert made(["abcde"], window=6).groups(1)
    assert "context of 32" in refusal([LETTERS * 9], window=33)
    assert {len(w) for w in windows(made([LETTERS * 9], window=0).groups(1))} == {32}
    said = refusal(["abc" * 9, "aXb" * 9, "c\nX\u00e9"])
    assert "document 1" in said and " 3 characters" in said and repr("\nX\u00e9") in said
    assert "model.scratch.alphabet" in said and "'trained'" in said
    said = refusal(["abc" * 9], ["{}"])
    assert "'{}'" in said
    with pytest.raises(ValueError, match=r"pretrain\.window = 1"):
        PretrainConfig(window=1)


def test_reserved_characters_come_back() -> None:
    tokenizer = character_tokenizer("<>#{}=;_ab")
    renderer = Renderer(tokenizer)
    examples = made(["a<b>#{a}=;_b"], renderer=renderer, window=13)
    (window, *_) = windows(examples.groups(1))
    assert renderer.shown(window) == "a<b>#{a}=;_b<|end|>"


def test_the_loss_falls_below_the_entropy_of_single_tokens() -> None:
    words = random.Random(0)
    text = " ".join(words.choices(["the", "cat", "sat", "on", "mat", "and", "dog"], k=800))
    examples = made([text], window=24, examples_per_step=8)
    settings = TrainerConfig(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    trainer = Trainer(PolicyRoot(tiny_model()), settings, Scoring(), 25)
    losses = []
    for step in range(1, 26):
        batch = SupervisedLoss().prepare(collate(examples.groups(step)))
        metrics = trainer.train_step(batch, SupervisedLoss().compute_loss)
        losses.append(number(metrics, "train/loss"))
    assert losses[0] > examples.unigram_entropy > max(losses[-5:]) + 0.3
