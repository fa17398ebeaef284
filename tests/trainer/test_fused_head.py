"""The fused head equals autograd through the naive head, with one chunk of logits in memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import VOCABULARY, Allocations, grpo, ragged_batch, relative, step_gradient, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

import sixfold.model.head
from sixfold.batch import KeptSets
from sixfold.model.head import LogitFinish
from sixfold.trainer import fused_head, logprobs
from sixfold.trainer.fused_head import HeadSettings, fused_scores
from sixfold.trainer.logprobs import PolicyRoot, Scoring, chunk_size, score_chunk
from sixfold.trainer.packing import pack

torch.set_num_threads(1)
PLAIN = HeadSettings(LogitFinish(), 1.0, 7)
CASES = {
    "plain": PLAIN,
    "one chunk": replace(PLAIN, chunk=64),
    "temperature": replace(PLAIN, temperature=0.6),
    "entropy": replace(PLAIN, temperature=0.6, entropy_gradient=True),
    "soft cap": replace(PLAIN, finish=LogitFinish(cap=2.0), temperature=0.6),
    "scaled": replace(PLAIN, finish=LogitFinish(divisor=3.0, factor=0.5), entropy_gradient=True),
    "capped entropy": replace(PLAIN, finish=LogitFinish(2.0, 3.0, 1.5), entropy_gradient=True),
}


def case(
    positions: int = 20, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head with a bias, hidden states and targets."""
    torch.manual_seed(0)
    head = nn.Linear(16, VOCABULARY).to(dtype)
    hidden = torch.randn(positions, 16, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(VOCABULARY, (positions,))


def kept_sets(positions: int, target: Tensor) -> KeptSets:
    """Kept sets of 1 to 9 tokens, target included. Every third token has no set."""
    sets = [sorted({int(t), *range(i % 9)}) if i % 3 else [] for i, t in enumerate(target)]
    assert len(sets) == positions
    count = torch.tensor([len(s) for s in sets])
    ids = torch.tensor([i for s in sets for i in s], dtype=torch.int32)
    return KeptSets(ids, count.cumsum(0) - count, count)


def naive(
    head: nn.Linear, hidden: Tensor, target: Tensor, settings: HeadSettings, kept: KeptSets | None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by definition, from a table of all logits."""
    logits = settings.finish.apply(head(hidden)) / settings.temperature
    if kept is not None:
        logits = logits.masked_fill(kept.excluded(VOCABULARY), -1e9)
    logp = logits.log_softmax(-1)
    return logp[range(len(target)), target], -(logp.exp() * logp).sum(-1)


def gradients(head: nn.Linear, hidden: Tensor, scores: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of the scores."""
    made = torch.Generator().manual_seed(1)
    logp, entropy = scores
    weights = torch.randn(2, len(logp), generator=made, dtype=logp.dtype)
    loss = (weights[0] * logp).sum()
    if entropy.requires_grad:
        loss = loss + (weights[1] * entropy).sum()
    return list(torch.autograd.grad(loss, [hidden, head.weight, head.bias]))


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_naive_head_in_float64(name: str, truncated: bool) -> None:
    settings, (head, hidden, target) = CASES[name], case(dtype=torch.float64)
    kept = kept_sets(len(target), target) if truncated else None
    got, expected = (f(head, hidden, target, settings, kept) for f in (fused_scores, naive))
    torch.testing.assert_close(got[0], expected[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got[1], expected[1], atol=1e-8, rtol=1e-8)
    assert got[1].requires_grad == settings.entropy_gradient
    if not settings.entropy_gradient:
        expected = (expected[0], expected[1].detach())
    for a, b in zip(gradients(head, hidden, got), gradients(head, hidden, expected), strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize(("name", "tables"), [("plain", 5), ("one chunk", 1), ("soft cap", 6)])
def test_backward_computes_all_tables_but_the_last_of_the_forward_pass(
    name: str, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 20 positions, in 3 chunks of 7 or in one chunk."""
    made: list[int] = []
    table = fused_head._Table
    logp = table.logp
    monkeypatch.setattr(table, "logp", lambda *a, **k: made.append(1) or logp(*a, **k))
    settings, (head, hidden, target) = CASES[name], case()
    total = fused_scores(head, hidden, target, settings)[0].sum()
    first, second = (
        torch.autograd.grad(total, [hidden, head.weight], retain_graph=True) for _ in range(2)
    )
    chunks = len(hidden.split(settings.chunk))
    assert len(made) == tables + chunks
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("chunk", [64, 7])
def test_float32_scores_have_the_bits_of_log_softmax(chunk: int) -> None:
    """Gradients of all weights agree up to rounding. The head is tied to the embedding."""
    model, batch = tiny_model(), ragged_batch(0)
    row, made = pack(batch, range(12), True), []
    for fused in (True, False):
        twin = copy.deepcopy(model)
        hidden = PolicyRoot(twin).states(row, Scoring())
        if fused:
            settings = replace(PLAIN, chunk=chunk, temperature=0.6)
            head = twin.get_output_embeddings()
            logp, entropy = fused_scores(head, hidden, row.target, settings)
        else:
            parts = [
                score_chunk(twin, h, t, 0.6)
                for h, t in zip(hidden.split(chunk), row.target.split(chunk), strict=True)
            ]
            logp, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in twin.parameters()])
        made.append((logp, entropy, gradient))
    (logp, entropy, gradient), (*values, expected) = made
    assert len(row.target) > 14
    assert torch.equal(logp, values[0]) and torch.equal(entropy, values[1])
    assert relative(gradient, expected) < 1e-6


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
def test_a_step_equals_the_head_by_autograd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients of a step on each architecture. A head with a hook runs by autograd."""
    sizes = {"final_logit_softcapping": 1.5} if kind == "gemma2" else {}
    batch, made = ragged_batch(0), []
    calls: list[int] = []
    fused = logprobs.fused_scores
    monkeypatch.setattr(logprobs, "SMALL", 0)
    monkeypatch.setattr(logprobs, "fused_scores", lambda *a: calls.append(1) or fused(*a))
    for hooked in (False, True):
        model = tiny_model(kind, **sizes)
        if hooked:
            model.get_output_embeddings().register_forward_hook(lambda *_: None)
        made.append(step_gradient(model, batch, grpo().compute_loss, Scoring(0.8, 16)))
        assert len(calls) == 1
    assert relative(*made) < 1e-6


def test_small_tables_are_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small models compute the same bits as before, at the same speed."""
    model, row = tiny_model(), pack(ragged_batch(0), range(12), True)
    seen: list[int] = []
    fused = logprobs.fused_scores
    monkeypatch.setattr(logprobs, "fused_scores", lambda *a: seen.append(1) or fused(*a))
    for chunk in (1024, 16):
        by_autograd = PolicyRoot(model)(row, Scoring(chunk=chunk))
        assert not seen
        table = min(chunk, len(row.target)) * VOCABULARY
        with monkeypatch.context() as smaller:
            smaller.setattr(logprobs, "SMALL", table - 1)
            recomputed = PolicyRoot(model)(row, Scoring(chunk=chunk))
        assert seen.pop()
        assert torch.equal(by_autograd.values, recomputed.values)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_bfloat16_sums_stay_float32(
    weights: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the float64 head on rounded factors.

    Each of 300 positions adds a small share to the weight's gradient. A bfloat16 sum would lose it.
    """
    for module in (sixfold.model.head, fused_head) if wide else ():
        monkeypatch.setattr(module, "wide_products", lambda device: True)
        monkeypatch.setattr(module, "wide_mm", lambda a, b: a.float() @ b.float())
    head, hidden, target = case(300)
    head = head.to(weights)
    for p in head.parameters():
        p.grad_dtype = torch.float32
    settings = replace(PLAIN, product=torch.bfloat16)
    logp, _ = fused_scores(head, hidden, target, settings)
    (logp * torch.linspace(0.5, 1, 300)).sum().backward()
    exact = nn.Linear(16, VOCABULARY).double()
    exact.weight.data = head.weight.detach().bfloat16().double()
    exact.bias.data = head.bias.detach().double()
    states = hidden.detach().bfloat16().double().requires_grad_()
    expected, _ = naive(exact, states, target, settings, None)
    (expected * torch.linspace(0.5, 1, 300)).sum().backward()
    torch.testing.assert_close(logp.double(), expected, atol=1e-5, rtol=1e-5)
    assert head.weight.grad.dtype == torch.float32
    # The wide kernel reads the gradient of the logits in bfloat16.
    assert relative(head.weight.grad, exact.weight.grad) < (2e-3 if wide else 1e-5)
    assert relative(hidden.grad, states.grad) < 5e-3


def test_frozen_parts_get_no_gradient_and_no_memory() -> None:
    """With LoRA the head's weight is frozen. A frozen body needs no gradient of hidden states."""
    head, hidden, target = case()
    head.requires_grad_(False)
    with Allocations(width=16) as seen:
        fused_scores(head, hidden, target, PLAIN)[0].sum().backward()
    assert hidden.grad is not None and head.weight.grad is None
    assert seen.wide <= hidden.numel() < head.weight.numel()
    head.requires_grad_(True)
    fused_scores(head, hidden.detach(), target, PLAIN)[0].sum().backward()
    assert head.weight.grad is not None


def test_a_row_without_positions_gives_zero_gradients() -> None:
    """A rank without rows still gets gradients, which are zeros."""
    head, hidden, target = case(0)
    logp, entropy = fused_scores(head, hidden, target, PLAIN)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    for p in head.parameters():
        assert p.grad is not None and not p.grad.any()


def peak(
    model: PreTrainedModel | nn.Linear, positions: int, naively: bool, **changed: object
) -> int:
    """Peak bytes of a head's forward and backward pass, on the meta device."""
    hidden = torch.empty(positions, model.in_features, device="meta", requires_grad=True)
    target = torch.empty(positions, dtype=torch.int64, device="meta")
    settings = replace(PLAIN, chunk=chunk_size(1024, model.out_features), **changed)
    with Allocations() as seen:
        if naively:
            logp = model(hidden).log_softmax(-1).gather(-1, target[:, None])
        else:
            logp, _ = fused_scores(model, hidden, target, settings)
        logp.sum().backward()
    return seen.peak_bytes


def test_peak_memory_at_a_large_vocabulary() -> None:
    """4,096 tokens at V = 151,936 take under 10 % of the naive head: little more than one table of
    a chunk, 268 MB, beside the weight's gradient.
    """
    head = nn.Linear(64, 151_936, bias=False, device="meta")
    table, gradient = 4 * logprobs.TABLE, 4 * head.weight.numel()
    mine = peak(head, 4096, naively=False)
    head.weight.grad = None
    plain = peak(head, 4096, naively=True)
    assert plain > 2 * 4096 * 151_936 * 4
    assert mine < 0.1 * plain
    assert mine < table + 2 * gradient + 5e7


def test_peak_memory_does_not_grow_with_vocabulary_or_positions() -> None:
    """Besides one table, only the gradients of weight and hidden states grow."""
    tables = []
    for vocabulary, positions in ((40_000, 3_000), (160_000, 3_000), (160_000, 6_000)):
        head = nn.Linear(8, vocabulary, bias=False, device="meta")
        gradients = 2 * 4 * head.weight.numel() + 2 * 4 * 8 * positions
        tables.append(peak(head, positions, naively=False) - gradients)
    assert max(tables) < 4 * logprobs.TABLE + 5e7
