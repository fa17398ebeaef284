"""Kept sets of top-k, top-p and min-p, against a slow version that builds the set token by token;
ties by hand.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from sixfold.engine import truncation
from sixfold.engine.engine import Engine
from sixfold.engine.sampler import sample
from sixfold.engine.truncation import truncate
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.types import SamplingParams

VOCABULARY = 40
OFF = SamplingParams(max_tokens=1)


def params_of(rng: random.Random, *, truncating: bool = False) -> SamplingParams:
    made = SamplingParams(
        max_tokens=1,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 1, 7, VOCABULARY, 99]),
        top_p=rng.choice([1.0, 1.0, 0.2, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
    )
    return params_of(rng, truncating=True) if truncating and not made.truncates else made


def slow_set(logits: Tensor, p: SamplingParams) -> tuple[list[int], float]:
    """Kept ids ascending, and their probability. One rule after another, a token at a time, equals
    by id.
    """
    probs = logits.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    kept = order[: p.top_k] if p.top_k else order
    whole = math.fsum(probs[t] for t in kept)
    if p.top_p < 1.0:
        nucleus: list[int] = []
        for t in kept:
            if nucleus and math.fsum(probs[u] for u in nucleus) / whole >= p.top_p:
                break
            nucleus.append(t)
        kept = nucleus
    kept = [t for t in kept if probs[t] >= p.min_p * probs[order[0]]]
    return sorted(kept), math.fsum(probs[t] for t in kept)


def sets(logits: Tensor, *params: SamplingParams) -> list[list[int]]:
    return [ids.tolist() for _, ids, _ in truncate(logits, params).sets()]


@pytest.mark.parametrize("window", [1, 4, 1024])
def test_every_row_keeps_what_the_slow_version_keeps(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens are sorted at first."""
    monkeypatch.setattr(truncation, "WINDOW", window)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(40):
        params = [params_of(rng) for _ in range(6)]
        logits = torch.randn(6, VOCABULARY, generator=generator) * 2
        rows = [b for b, p in enumerate(params) if p.truncates]
        if not rows:
            continue
        got = list(truncate(logits, params).sets())
        assert [row for row, _, _ in got] == rows
        for row, ids, mass in got:
            expected, probability = slow_set(logits[row], params[row])
            assert ids.tolist() == expected, params[row]
            assert mass == pytest.approx(probability, abs=1e-12)
            sizes.add(len(expected))
    assert {1, 7, VOCABULARY} <= sizes


def test_a_tie_at_the_kth_place_goes_to_the_lower_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    assert sets(logits, SamplingParams(1, top_k=3)) == [[1, 2, 3]]
    assert sets(logits, SamplingParams(1, top_k=4)) == [[1, 2, 3, 4]]
    assert sets(torch.zeros(1, 5), SamplingParams(1, top_k=2)) == [[0, 1]]


def test_a_tie_at_the_edge_of_top_p_goes_to_the_lower_ids() -> None:
    """Four equal tokens: two are exactly one half, so at 0.5 a third is not needed, and above it
    is.
    """
    logits = torch.zeros(1, 4)
    assert sets(logits, SamplingParams(1, top_p=0.5)) == [[0, 1]]
    assert sets(logits, SamplingParams(1, top_p=0.51)) == [[0, 1, 2]]
    quarter = torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert sets(quarter, SamplingParams(1, top_p=0.5)) == [[1]]
    assert sets(quarter, SamplingParams(1, top_p=0.6)) == [[0, 1]]


def test_the_edges_of_min_p_and_of_what_is_possible() -> None:
    """As probable as the floor is kept; a logit of -inf never is; the best always is."""
    logits = torch.tensor([[0.0, 0.0, -math.inf, -5.0]])
    assert sets(logits, SamplingParams(1, min_p=1.0)) == [[0, 1]]
    assert sets(logits, SamplingParams(1, top_k=4)) == [[0, 1, 3]]
    assert sets(logits, SamplingParams(1, top_p=0.0)) == [[0]]


def test_a_limit_that_is_off_cuts_nothing_however_improbable() -> None:
    """100,000 equal tokens below one: the running sum reaches 1 in rounding, and top_p = 1 must not
    read it.
    """
    logits = torch.full((1, 100_000), -30.0)
    logits[0, 0] = 30.0
    assert len(sets(logits, SamplingParams(1, min_p=1e-300))[0]) == 100_000
    assert len(sets(logits, SamplingParams(1, top_k=99_999))[0]) == 99_999


def test_row_keeps_and_samples_the_same_tokens_alone_and_in_a_batch() -> None:
    rng = random.Random(3)
    params = [params_of(rng) for _ in range(24)]
    logits = (
        torch.randn(24, VOCABULARY, generator=torch.Generator().manual_seed(3)).mul(4).round()
    )  # rounded: full of ties
    noise, history = [rng.random() for _ in params], [[b, b, 5] for b in range(24)]
    tokens, logps, cut = sample(logits, params, noise, history)
    assert cut is not None
    together = {row: (ids, mass) for row, ids, mass in cut.sets()}
    for b, p in enumerate(params):
        token, logp, alone = sample(logits[b : b + 1], [p], noise[b : b + 1], history[b : b + 1])
        assert (token[0], logp[0]) == (tokens[b], logps[b])
        assert p.truncates == (b in together)
        if alone is not None:
            assert [(ids, mass) for _, ids, mass in alone.sets()] == [together[b]]


def test_rows_without_truncation_are_not_changed_by_other_rows() -> None:
    rng = random.Random(4)
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(4))
    noise, history = [rng.random() for _ in range(9)], [[0]] * 9
    plain = sample(logits, [OFF] * 9, noise, history)
    assert plain.cut is None
    mixed = sample(
        logits,
        [SamplingParams(1, top_p=0.3) if b % 3 == 1 else OFF for b in range(9)],
        noise,
        history,
    )
    assert mixed.cut is not None and mixed.cut.rows == [1, 4, 7]
    same = [b for b in range(9) if b % 3 != 1]
    assert torch.equal(mixed.token[same], plain.token[same]) and torch.equal(
        mixed.logp[same], plain.logp[same]
    )


def test_the_full_log_prob_less_the_log_of_the_mass_is_the_truncated_one() -> None:
    rng = random.Random(5)
    params = [params_of(rng, truncating=True) for _ in range(60)]
    logits = torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    noise = [rng.random() for _ in params]
    tokens, logps, cut = sample(logits, params, noise, [[1]] * 60)
    assert cut is not None and len(cut.rows) == 60
    temperature = torch.tensor([p.temperature or 1.0 for p in params])
    seen = torch.where(
        torch.arange(VOCABULARY) == 1,
        torch.tensor([p.repetition_penalty for p in params])[:, None],
        1.0,
    )
    full = (
        (torch.where(logits > 0, logits / seen, logits * seen) / temperature[:, None])
        .log_softmax(-1)
        .gather(-1, tokens[:, None])[:, 0]
    )
    torch.testing.assert_close(full - cut.mass.log().float(), logps, atol=2e-6, rtol=1e-6)
    assert all(int(token) in ids for token, (_, ids, _) in zip(tokens, cut.sets(), strict=True))


def test_the_engine_gives_each_sampled_token_its_set(policy: Policy) -> None:
    """Two requests side by side, one of them truncated; and nothing depends on who runs beside
    whom.
    """
    cut, full = SamplingParams(12, temperature=0.9, top_p=0.8), SamplingParams(12)
    made = {}
    for running in (16, 1):
        engine = Engine(CausalLM(policy.model), kv_tokens=600, max_running=running)
        engine.add("a", [6, 7, 8], cut, [0, 1, 2])
        engine.add("b", [6, 7, 8], full, [0, 1])
        made[running] = {(s.request.key, s.sample): s for s in engine.run()}
    for key, s in made[16].items():
        assert (s.tokens, s.kept) == (made[1][key].tokens, made[1][key].kept)
        assert len(s.kept) == (len(s.logp) if key[0] == "a" else 0)
        at = 0
        for n, (token, count) in enumerate(zip(s.tokens[3:], s.kept.counts, strict=False)):
            ids = s.kept.ids[at : at + count]
            at += count
            with torch.no_grad():
                logits = (
                    policy.model(torch.tensor([s.tokens[: 3 + n]]), use_cache=False)
                    .logits[0, -1]
                    .float()
                )
            expected, mass = slow_set(logits / 0.9, cut)
            assert ids.tolist() == expected and token in expected
            assert s.kept.mass[n] == pytest.approx(mass, abs=1e-5)
