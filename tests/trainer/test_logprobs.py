"""Chunked log-probs: equal to the full softmax, in bounded memory, float32 whatever the forward
runs in.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import (
    VOCABULARY,
    Allocations,
    grpo,
    make_trainer,
    plain_logits,
    plain_logp,
    ragged_batch,
    relative,
    step_gradient,
    tiny_model,
)
from torch import nn

from sixfold.model.causal_lm import head_logits
from sixfold.trainer.logprobs import (
    TABLE,
    PolicyRoot,
    Scoring,
    chunk_size,
    score_batch,
    score_chunk,
)
from sixfold.trainer.packing import pack

torch.set_num_threads(1)


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_any_chunk_equals_the_naive_softmax(chunk: int, temperature: float) -> None:
    model, batch = tiny_model(), ragged_batch(0)
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model), batch, temperature)
    got = score_batch(model, batch, Scoring(temperature, chunk), 10**6, True)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    assert not got[~batch.mask].any()


@pytest.mark.parametrize("chunk", [16, 50])
def test_gradients_do_not_depend_on_the_chunk(chunk: int) -> None:
    model, batch = tiny_model(), ragged_batch(0)
    whole = step_gradient(model, batch, grpo().compute_loss, Scoring(0.8, 10**6))
    assert (
        relative(step_gradient(model, batch, grpo().compute_loss, Scoring(0.8, chunk)), whole)
        < 1e-6
    )


def test_entropy_is_exact_and_carries_no_gradient() -> None:
    model, batch = tiny_model(), ragged_batch(0)
    row = pack(batch, range(12), True)
    _, entropy = PolicyRoot(model)(row, Scoring(0.7, 8))
    logits = plain_logits(copy.deepcopy(model), batch).detach().double() / 0.7
    p = logits.softmax(-1)
    expected = -(p * p.log()).sum(-1)[row.row, row.column - 1]
    torch.testing.assert_close(entropy.double(), expected, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


def test_entropy_of_a_certain_token_is_zero_not_nan() -> None:
    class Head(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    model = tiny_model()
    model.set_output_embeddings(Head())
    hidden = torch.full((1, 31), -math.inf)
    hidden[0, 3] = 0.0
    logp, entropy = score_chunk(model, hidden, torch.tensor([3]), 1.0)
    assert float(logp) == 0.0 and float(entropy) == 0.0


@pytest.mark.slow
def test_logits_exist_for_one_chunk_at_a_time_forward_and_backward() -> None:
    """Vocabulary 509, chunks of 16 positions, some 250 scored: no tensor of all logits, and never
    two chunks' worth kept between passes.
    """
    model, batch = tiny_model(vocab_size=509), ragged_batch(0, groups=12, longest=30)
    scored = int(batch.mask.sum())
    assert scored > 12 * 16
    trainer = make_trainer(model, Scoring(1.0, 16))
    with Allocations(width=509) as seen:
        trainer.train_step(batch, grpo().compute_loss)
    assert 0 < seen.wide <= 16 * 509
    assert (
        seen.peak <= 4 * 16 * 509
    )  # logits, log-softmax, their gradients and the entropy's temporaries, of one chunk
    with Allocations(width=509) as naive:
        plain_logp(copy.deepcopy(model), batch).sum().backward()
    assert naive.wide >= batch.tokens.numel() * 509


def test_under_bf16_log_probs_and_gradients_stay_float32() -> None:
    model, batch = tiny_model(), ragged_batch(0)
    scoring = Scoring(autocast=torch.bfloat16)
    row = pack(batch, range(12), True)
    logp, entropy = PolicyRoot(model)(row, scoring)
    assert logp.dtype == entropy.dtype == torch.float32
    exact, _ = PolicyRoot(model)(row, Scoring())
    assert 0.0 < float((logp - exact).detach().abs().max()) < 0.3
    logp.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_small_gradients_survive_accumulation_under_bf16() -> None:
    """Micro-batches add up in float32: in bfloat16 256 + 1 is 256, so a row at a time would lose
    what all rows at once keep.
    """
    model, batch = tiny_model(), ragged_batch(0, groups=6)
    scoring = Scoring(autocast=torch.bfloat16)
    at_once = step_gradient(model, batch, grpo().compute_loss, scoring)
    apart = step_gradient(model, batch, grpo().compute_loss, scoring, max_tokens_per_microbatch=16)
    exact = step_gradient(model, batch, grpo().compute_loss)
    assert relative(apart, exact) < 1.5 * relative(at_once, exact) + 1e-3


def test_soft_cap_and_scaled_logits_reach_the_log_probs() -> None:
    """The head's own finish (Gemma 2 caps its logits) is part of the distribution."""
    model = tiny_model("gemma2", final_logit_softcapping=0.5)
    hidden = torch.randn(4, 16)
    raw = model.get_output_embeddings()(hidden)
    torch.testing.assert_close(head_logits(model, hidden), 0.5 * torch.tanh(raw / 0.5))
    batch = ragged_batch(0)
    with torch.no_grad():
        expected = plain_logp(copy.deepcopy(model), batch)
    torch.testing.assert_close(
        score_batch(model, batch, Scoring(), 64, True), expected, atol=2e-5, rtol=1e-5
    )


def test_scoring_a_batch_without_sampled_tokens_is_all_zeros() -> None:
    batch = ragged_batch(0)
    empty = batch.with_(mask=torch.zeros_like(batch.mask))
    assert not score_batch(tiny_model(), empty, Scoring(), 64, True).any()


def test_a_large_vocabulary_makes_chunks_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 152,000 words a table of 1,024 positions would be 0.6 GB, and several are alive at once.
    Small vocabularies keep their chunk.
    """
    assert chunk_size(1024, 152_000) * 152_000 <= TABLE < (chunk_size(1024, 152_000) + 1) * 152_000
    assert (
        chunk_size(1024, 32_000) == 1024
        and chunk_size(16, 152_000) == 16
        and chunk_size(1024, 10**9) == 1
    )
    model, row = tiny_model(), pack(ragged_batch(1), range(12), True)
    whole = PolicyRoot(model)(row, Scoring())
    monkeypatch.setattr("sixfold.trainer.logprobs.TABLE", 20 * VOCABULARY)
    with Allocations(width=VOCABULARY) as seen:
        parts = PolicyRoot(model)(row, Scoring())
    assert len(row.target) > 20 and seen.wide <= 20 * VOCABULARY
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b)
