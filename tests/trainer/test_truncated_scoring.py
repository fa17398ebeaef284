"""Log-probs over the sampler's kept sets, against a dense version that takes each token's set from
a Python list; values, gradients, entropies.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import (
    VOCABULARY,
    Allocations,
    grpo,
    make_trainer,
    plain_logits,
    ragged_groups,
    relative,
    step_gradient,
    tiny_model,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.batch import Batch, KeptSets, collate, filled
from sixfold.reference.frozen import FrozenReference, FusedReference
from sixfold.trainer.logprobs import (
    PolicyRoot,
    Proximal,
    Scoring,
    score_batch,
    score_chunk,
    score_tables,
)
from sixfold.trainer.packing import pack
from sixfold.types import Group, Kept

torch.set_num_threads(1)
KINDS = ["qwen3", "mistral", "gemma2", "gpt2"]
Sets = dict[tuple[int, int], list[int]]
"""(row, column) -> what was kept there."""


def truncated_groups(seed: int, rows: int = 12, truncates: float = 1.0) -> tuple[list[Group], Sets]:
    """Ragged groups with made-up kept sets, each with its token in it; a share of the rows drew
    from everything.
    """
    rng, groups, sets = random.Random(seed), ragged_groups(seed), Sets()
    for b, t in enumerate(t for g in groups for t in g.trajectories):
        if b >= rows or rng.random() >= truncates:
            continue
        t.kept = Kept()
        for column in (i for i, m in enumerate(t.mask) if m):
            others = rng.sample(range(VOCABULARY), rng.choice([0, 1, 4, VOCABULARY]))
            sets[b, column] = sorted({t.tokens[column], *others})
            t.kept.add(array("i", sets[b, column]), 0.5)
    return groups, sets


def dense(
    logits: Tensor, batch: Batch, sets: Sets, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) [B, T] from logits [B, T, V], token by token, by the definition."""
    logp, entropy = (
        torch.zeros(batch.tokens.shape, dtype=logits.dtype),
        torch.zeros(batch.tokens.shape, dtype=logits.dtype),
    )
    for b, column in batch.mask.nonzero().tolist():
        kept = sets.get((b, column), list(range(logits.shape[-1])))
        z = logits[b, column - 1, kept] / temperature
        p = z.exp() / z.exp().sum()
        logp[b, column] = p[kept.index(int(batch.tokens[b, column]))].log()
        entropy[b, column] = -(p * p.log()).sum()
    return logp, entropy


def oracle(
    model: PreTrainedModel, batch: Batch, sets: Sets, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return dense(plain_logits(copy.deepcopy(model), batch).double(), batch, sets, temperature)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_entropies_equal_the_dense_version(kind: str, share_prefix: bool) -> None:
    """Prompts shared or not, micro-batches cut anywhere, chunks of 16 positions; some rows drew
    from everything.
    """
    model = tiny_model(kind)
    groups, sets = truncated_groups(1, truncates=0.7)
    batch = collate(groups)
    assert 0 < sum(any(key[0] == b for key in sets) for b in range(12)) < 12
    logp, entropy = oracle(model, batch, sets, 0.8)
    for most in (10**6, 40, 16):
        got = score_tables(PolicyRoot(model), batch, Scoring(0.8, 16), most, share_prefix)
        torch.testing.assert_close(got[0].double(), logp, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got[1].double(), entropy, atol=2e-5, rtol=1e-5)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_steps_gradient_equals_the_dense_version(kind: str, share_prefix: bool) -> None:
    model, algorithm = tiny_model(kind), grpo(beta=0.05)
    groups, sets = truncated_groups(2)
    batch = collate(groups)
    batch = algorithm.prepare(batch.with_(ref_logp=batch.old_logp - 0.1 * batch.mask))
    plain = copy.deepcopy(model)
    algorithm.compute_loss(batch, dense(plain_logits(plain, batch), batch, sets)[0]).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    for most, chunk in ((10**6, 1024), (33, 16)):
        got = step_gradient(
            model,
            batch,
            algorithm.compute_loss,
            Scoring(1.0, chunk),
            share_prefix=share_prefix,
            max_tokens_per_microbatch=most,
        )
        assert relative(got, expected) < 1e-5


class Identity(nn.Module):
    """A head whose logits are the hidden states."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


@contextmanager
def in_float64() -> Iterator[None]:
    """The head's logits as they come, where they are otherwise made float32. For models with a
    plain head.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sixfold.trainer.logprobs.head_logits",
            lambda model, hidden: model.get_output_embeddings()(hidden),
        )
        yield


def kept_sets(*sets: list[int]) -> KeptSets:
    count = torch.tensor([len(s) for s in sets])
    return KeptSets(
        torch.tensor([i for s in sets for i in s], dtype=torch.int32),
        count.cumsum(0) - count,
        count,
    )


@pytest.mark.slow
@hypothesis_settings(max_examples=20, deadline=None)
@given(st.data())
def test_exact_gradients_of_log_prob_and_entropy_in_float64(data: st.DataObject) -> None:
    """Finite differences, and the formulas: d log pi(a) = 1[a] - pi over the set, and 0
    outside it.
    """
    model = tiny_model()
    model.set_output_embeddings(Identity())
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    sets = [sorted(rng.sample(range(6), rng.randint(1, 6))) for _ in range(4)]
    target = torch.tensor([rng.choice(s) for s in sets])
    kept = kept_sets(*sets[:3], [])  # the last drew from everything
    logits = torch.randn(
        4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rng.randrange(99))
    ).requires_grad_()
    with in_float64():
        torch.autograd.gradcheck(lambda z: score_chunk(model, z, target, 0.7, True, kept), logits)
        logp, _ = score_chunk(model, logits, target, 1.0, False, kept)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    for row, ids in enumerate([*sets[:3], list(range(6))]):
        expected = torch.zeros(6, dtype=torch.float64)
        expected[ids] = -logits[row, ids].softmax(-1)
        expected[target[row]] += 1
        torch.testing.assert_close(gradient[row], expected, atol=1e-12, rtol=0)


def test_gradients_of_every_weight_in_float64() -> None:
    """The whole way, packed, in chunks that are computed again. GPT-2: transformers' RMSNorm and
    rotary angles are float32 whatever the weights.
    """
    model = tiny_model("gpt2").double()
    groups, sets = truncated_groups(3)
    batch = collate(groups)
    weight = torch.rand(
        batch.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    gradients = []
    for packed in (True, False):
        twin = copy.deepcopy(model)
        if packed:
            row = pack(batch, range(12), True)
            with in_float64():
                logp, entropy = PolicyRoot(twin)(row, Scoring(0.9, 16, entropy_gradient=True))
                (
                    weight[row.row, row.column] * (logp + 0.3 * entropy)
                ).sum().backward()  # which scores the chunks again
        else:
            logp, entropy = dense(plain_logits(twin, batch), batch, sets, 0.9)
            (weight * (logp + 0.3 * entropy))[batch.mask].sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
        )
    assert relative(gradients[0], gradients[1]) < 1e-10


def test_the_expected_gradient_without_an_advantage_is_zero_and_by_the_full_softmax_is_not() -> (
    None
):
    """sum over the set of pi(a) d log pi(a) = 0: what makes a baseline free of bias."""
    model = tiny_model()
    model.set_output_embeddings(Identity())
    ids = [1, 2, 5]
    logits = torch.tensor([2.0, 0.5, -1.0, 0.3, 1.0, 0.0]).requires_grad_()
    drawn = logits.detach()[ids].softmax(-1)
    rows, target = logits.expand(3, 6), torch.tensor(ids)
    restricted, _ = score_chunk(model, rows, target, 1.0, False, kept_sets(ids, ids, ids))
    full, _ = score_chunk(model, rows, target, 1.0)
    biased = [torch.autograd.grad((drawn * logp).sum(), logits)[0] for logp in (restricted, full)]
    torch.testing.assert_close(biased[0], torch.zeros(6), atol=1e-7, rtol=0)
    assert float(biased[1].abs().max()) > 0.1


def test_without_kept_sets_nothing_changes_by_a_bit() -> None:
    """Rows that drew from everything score the same beside truncated rows as without them."""
    model = tiny_model()
    plain = collate(ragged_groups(4))
    groups, _ = truncated_groups(4, rows=4)
    mixed = collate(groups)
    assert plain.kept is None and mixed.kept is not None and not mixed.kept.count[4:].any()
    a, b = (
        score_batch(model, plain, Scoring(), 10**6, True),
        score_batch(model, mixed, Scoring(), 10**6, True),
    )
    assert torch.equal(a[4:], b[4:]) and not torch.equal(a[:4], b[:4])
    whole = ragged_groups(4)
    for t in (t for g in whole for t in g.trajectories):
        t.kept = Kept()
        for _ in range(sum(t.mask)):
            t.kept.add(array("i", range(VOCABULARY)), 1.0)
    assert torch.equal(score_batch(model, collate(whole), Scoring(), 10**6, True), a)


@pytest.mark.slow
def test_logits_still_exist_for_one_chunk_at_a_time() -> None:
    """As without truncation, and nothing as wide as the vocabulary is kept but the chunk's own."""
    model, (groups, _) = tiny_model(vocab_size=509), truncated_groups(0)
    batch = grpo().prepare(collate(groups))
    with Allocations(width=509) as seen:
        make_trainer(model, Scoring(1.0, 16)).train_step(batch, grpo().compute_loss)
    assert 0 < seen.wide <= 16 * 509
    assert seen.peak <= 7 * 16 * 509


def scorers(model: PreTrainedModel) -> Iterator[Tensor]:
    """ref_logp and prox_logp of the same weights as every scorer gives them."""
    groups, _ = truncated_groups(6)
    batch = collate(groups)
    yield score_batch(model, batch, Scoring(0.9, 16), 40, True)
    yield filled(
        FrozenReference(model, Scoring(0.9, 16), 40, True).score(batch).ref_logp, "ref_logp"
    )
    yield filled(
        Proximal(PolicyRoot(model), Scoring(0.9, 16), 40, True).score(batch).prox_logp, "prox_logp"
    )
    row = pack(batch, range(12), True)
    yield torch.zeros(batch.tokens.shape).index_put(
        (row.row, row.column), FusedReference(model, Scoring(0.9, 16)).scorer(row)
    )


def test_reference_and_proximal_policy_are_scored_over_the_same_sets() -> None:
    """So the reference that is the policy has KL 0, token by token."""
    policy, *others = scorers(tiny_model())
    for other in others:
        torch.testing.assert_close(other, policy, atol=1e-6, rtol=0)
