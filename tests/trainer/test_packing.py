"""Packed rows against ordinary padded forwards: log-probs, gradients, and any split into
micro-batches.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import (
    grpo,
    plain_gradient,
    plain_logp,
    ragged_batch,
    ragged_groups,
    relative,
    step_gradient,
    tiny_model,
    trajectory,
)
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.batch import Batch, collate
from sixfold.trainer.logprobs import Scoring, score_batch
from sixfold.trainer.packing import microbatches, pack
from sixfold.trainer.segments import continuation_mask
from sixfold.types import Group, Task

torch.set_num_threads(1)
KINDS = ["qwen3", "mistral", "gemma2", "gpt2", "gpt_oss"]
MODELS: dict[str, PreTrainedModel] = {}


def model_of(kind: str) -> PreTrainedModel:
    """Made once; nothing here changes its weights."""
    if kind not in MODELS:
        MODELS[kind] = tiny_model(kind)
    return MODELS[kind]


def packed_logp(
    model: PreTrainedModel,
    batch: Batch,
    share_prefix: bool,
    max_tokens: int = 10**6,
    temperature: float = 1.0,
) -> Tensor:
    return score_batch(model, batch, Scoring(temperature), max_tokens, share_prefix)


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        (k, i)
        for k in KINDS
        for i in ("eager", "sdpa")
        if (k, i) not in (("gemma2", "sdpa"), ("gpt_oss", "sdpa"))
    ],
)  # transformers' sdpa leaves out Gemma 2's soft cap
def test_log_probs_equal_the_plain_padded_forward(
    kind: str, implementation: str, share_prefix: bool
) -> None:
    """Mistral and Gemma 2 with a window of 5 tokens, shorter than most rows here."""
    batch = ragged_batch(1)
    assert int(batch.lengths.max()) > 15 and int(batch.prompt_lengths.min()) == 1
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model_of(kind)), batch, implementation=implementation)
    torch.testing.assert_close(
        packed_logp(model_of(kind), batch, share_prefix), expected, atol=2e-5, rtol=1e-5
    )


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_plain_padded_forward(kind: str, share_prefix: bool) -> None:
    algorithm = grpo(beta=0.05)
    batch = ragged_batch(2, algorithm)
    expected = plain_gradient(model_of(kind), batch, algorithm.compute_loss)
    got = step_gradient(model_of(kind), batch, algorithm.compute_loss, share_prefix=share_prefix)
    assert relative(got, expected) < 1e-5


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("short", "waste"), [(0, 1.0), (10**9, 1.0), (10**9, 1e9)])
def test_attention_does_not_depend_on_gathering(
    monkeypatch: pytest.MonkeyPatch, kind: str, share_prefix: bool, short: int, waste: float
) -> None:
    """Every segment a call of its own, segments of one shape together, and all of them in one
    padded call.
    """
    monkeypatch.setattr("sixfold.trainer.segments.SHORT", short)
    monkeypatch.setattr("sixfold.trainer.segments.WASTE", waste)
    algorithm = grpo(beta=0.05)
    batch = ragged_batch(6, algorithm, longest=25)
    expected = plain_gradient(model_of(kind), batch, algorithm.compute_loss)
    assert (
        relative(
            step_gradient(model_of(kind), batch, algorithm.compute_loss, share_prefix=share_prefix),
            expected,
        )
        < 1e-5
    )


@pytest.mark.mostly_nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_any_split_equals_one_batch_for_every_aggregation(
    aggregation: str, share_prefix: bool
) -> None:
    """From all rows at once, through cuts inside groups, to a row at a time; the first is the plain
    forward's gradient.
    """
    algorithm = grpo(aggregation, beta=0.05)
    batch = ragged_batch(3, algorithm)
    expected = plain_gradient(model_of("qwen3"), batch, algorithm.compute_loss)
    counts = set()
    for most in (10**6, 70, 33, 16):
        counts.add(len(microbatches(batch, range(12), most, share_prefix)))
        got = step_gradient(
            model_of("qwen3"),
            batch,
            algorithm.compute_loss,
            share_prefix=share_prefix,
            max_tokens_per_microbatch=most,
        )
        assert relative(got, expected) < 1e-5, f"at most {most} tokens"
    assert len(counts) == 4


@pytest.mark.slow
@hypothesis_settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(8, 80),
    st.booleans(),
)
def test_ragged_batches_of_any_form(
    seed: int, groups: int, samples: int, longest: int, most: int, share_prefix: bool
) -> None:
    """K = 1, single-token prompts and completions, tool output inside, cuts anywhere."""
    batch = ragged_batch(seed, groups=groups, samples=samples, longest=max(2, longest))
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model_of("mistral")), batch)
    torch.testing.assert_close(
        packed_logp(model_of("mistral"), batch, share_prefix, most), expected, atol=2e-5, rtol=1e-5
    )


def test_temperature_divides_the_logits() -> None:
    batch = ragged_batch(4)
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model_of("qwen3")), batch, temperature=0.7)
    torch.testing.assert_close(
        packed_logp(model_of("qwen3"), batch, True, temperature=0.7), expected, atol=2e-5, rtol=1e-5
    )


def test_a_shared_prompt_is_laid_out_once() -> None:
    """Two answers to [1, 2, 3] in one row: 3 + 2 + 3 tokens; what predicts a first token is the
    prompt's last.
    """
    groups = [
        Group(
            Task("t", "?"),
            [
                trajectory(0, 0, [1, 2, 3], [4, 5]),
                trajectory(0, 1, [1, 2, 3], [6, 7, 8], sampled=[True, False, True]),
            ],
        )
    ]
    row = pack(collate(groups), [0, 1], share_prefix=True)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert row.reads.tolist() == [2, 3, 2, 6]
    assert row.target.tolist() == [4, 5, 6, 8]
    assert row.row.tolist() == [0, 0, 1, 1] and row.column.tolist() == [3, 4, 3, 5]
    apart = pack(collate(groups), [0, 1], share_prefix=False)
    assert apart.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8]
    assert apart.reads.tolist() == [2, 3, 7, 9]


def test_different_prompts_of_one_group_are_not_shared() -> None:
    groups = [
        Group(
            Task("t", "?"),
            [trajectory(0, 0, [1, 2, 3], [4, 5]), trajectory(0, 1, [9, 2, 3], [4, 5])],
        )
    ]
    batch = collate(groups)
    assert pack(batch, [0, 1], share_prefix=True).tokens.tolist() == [1, 2, 3, 4, 5, 9, 2, 3, 4, 5]
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model_of("qwen3")), batch)
    torch.testing.assert_close(
        packed_logp(model_of("qwen3"), batch, True), expected, atol=2e-5, rtol=1e-5
    )


def test_rows_do_not_see_one_another() -> None:
    """Another row's sampled tokens replaced: this row's log-probs stay, bit for bit. (With another
    prompt too, fewer would be shared, and products of another size round in another way on some
    CPUs.)"""
    batch = collate(ragged_groups(5))
    sampled = torch.arange(batch.tokens.shape[1]) >= batch.prompt_lengths[:, None]
    changed = batch.with_(
        tokens=torch.where(
            (torch.arange(12)[:, None] == 7) & sampled, (batch.tokens + 1) % 31, batch.tokens
        )
    )
    for share_prefix in (True, False):
        a, b = (
            packed_logp(model_of("qwen3"), batch, share_prefix),
            packed_logp(model_of("qwen3"), changed, share_prefix),
        )
        others = torch.arange(12) != 7
        assert torch.equal(a[others], b[others]) and not torch.equal(a[7], b[7])


@pytest.mark.slow
@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(8, 120), st.booleans())
def test_micro_batches_keep_order_and_budget(seed: int, most: int, share_prefix: bool) -> None:
    batch = collate(ragged_groups(seed))
    rows = [b for b in range(12) if (seed + b) % 5]
    parts = microbatches(batch, rows, most, share_prefix)
    assert [b for part in parts for b in part] == rows
    sizes = [len(pack(batch, part, share_prefix).tokens) for part in parts]
    assert all(size <= most or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    for part, size, following in zip(parts, sizes, parts[1:], strict=False):
        grown = len(pack(batch, [*part, following[0]], share_prefix).tokens)
        assert grown > most, f"{size} tokens left room for one more trajectory: {grown} <= {most}"


def test_continuation_mask_by_hand() -> None:
    """Two tokens after a prompt of three, all or at most three keys to be seen."""
    device = torch.device("cpu")
    assert continuation_mask(3, 2, None, device).int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert continuation_mask(3, 2, 3, device).int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
