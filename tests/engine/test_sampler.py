"""The sampler against a slow, obvious numpy version, and its draws against the distribution they
should follow.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from sixfold.engine.noise import uniforms
from sixfold.engine.sampler import likeliest, sample
from sixfold.types import SamplingParams

VOCABULARY = 23


def slow_distribution(logits: np.ndarray, p: SamplingParams, history: list[int]) -> np.ndarray:
    """[V] probabilities, one token at a time."""
    scores = logits.astype(np.float64).copy()
    for token in set(history):
        scores[token] = (
            scores[token] / p.repetition_penalty
            if scores[token] > 0
            else scores[token] * p.repetition_penalty
        )
    scores /= p.temperature or 1.0
    weights = np.exp(scores - scores.max())
    probs = weights / weights.sum()
    best_first = sorted(range(len(probs)), key=lambda t: -probs[t])
    kept = set(best_first[: p.top_k] if p.top_k else best_first)
    probs = np.array([q if t in kept else 0.0 for t, q in enumerate(probs)])
    probs /= probs.sum()
    if p.top_p < 1.0:
        kept, mass = set(), 0.0
        for t in best_first:
            if kept and mass >= p.top_p:
                break
            kept.add(t)
            mass += probs[t]
        probs = np.array([q if t in kept else 0.0 for t, q in enumerate(probs)])
        probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def slow_sample(
    logits: np.ndarray, p: SamplingParams, u: float, history: list[int]
) -> tuple[int, float]:
    """Token and log-prob by walking along the distribution until the noise is used up."""
    probs = slow_distribution(logits, p, history)
    if p.temperature == 0:
        token = int(probs.argmax())
    else:
        token, mass = -1, 0.0
        while mass <= u:
            token += 1
            mass += probs[token]
    return token, math.log(probs[token])


def random_params(rng: random.Random) -> SamplingParams:
    """Each knob off as often as on."""
    return SamplingParams(
        max_tokens=4,
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, VOCABULARY, 100]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.3, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.7]),
    )


def test_matches_the_slow_version_for_any_mix_of_parameters_in_a_batch() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(60):
        rows = rng.randint(1, 8)
        params = [random_params(rng) for _ in range(rows)]
        if rng.random() < 0.3:  # the path for rows that all ask for the same
            params = params[:1] * rows
        logits = torch.randn(rows, VOCABULARY, generator=generator) * 2
        history = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))] for _ in range(rows)
        ]
        noise = [rng.random() for _ in range(rows)]
        before = logits.clone()
        tokens, logps, _ = sample(logits, params, noise, history)
        assert torch.equal(
            logits, before
        )  # the engine keeps a prompt's logits for its later samples
        for b in range(rows):
            token, logp = slow_sample(logits[b].numpy(), params[b], noise[b], history[b])
            assert tokens[b] == token, params[b]
            assert logps[b].item() == pytest.approx(logp, abs=1e-5), params[b]


def test_the_likeliest_tokens_are_those_of_the_distribution_sampled_from_and_only_where_asked() -> (
    None
):
    rng = random.Random(3)
    for trial in range(30):
        plain = SamplingParams(
            max_tokens=4, temperature=0.6
        )  # the rows that a kernel draws, whose last bit is another than PyTorch's
        params = [rng.choice([plain, random_params(rng)]) for _ in range(5)]
        params = [replace(p, top_logprobs=rng.choice([0, 0, 1, 4, VOCABULARY, 99])) for p in params]
        if trial % 3 == 0:
            params = params[:1] * 5
        logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(trial)) * 2
        noise, history = (
            [rng.random() for _ in params],
            [[rng.randrange(VOCABULARY)] for _ in params],
        )
        tokens, logps, _ = sample(logits, params, noise, history)
        before = logits.clone()
        found = likeliest(logits, params, history, tokens, logps)
        assert torch.equal(logits, before)
        assert set(found) == {b for b, p in enumerate(params) if p.top_logprobs}
        for b, top in found.items():
            probs = slow_distribution(logits[b].numpy(), params[b], history[b])
            best = [
                t for t in np.argsort(-probs)[: params[b].top_logprobs].tolist() if probs[t] > 0
            ]
            assert list(top) == best, params[b]
            assert list(top.values()) == pytest.approx([math.log(probs[t]) for t in best], abs=1e-5)
            assert top.get(int(tokens[b]), logps[b].item()) == logps[b].item()


def test_row_samples_the_same_token_alone_and_in_a_mixed_batch() -> None:
    rng = random.Random(1)
    params = [random_params(rng) for _ in range(16)]
    logits = torch.randn(16, VOCABULARY, generator=torch.Generator().manual_seed(1))
    noise, history = [rng.random() for _ in params], [[b % VOCABULARY] for b in range(16)]
    tokens, logps, _ = sample(logits, params, noise, history)
    for b in range(16):
        alone = sample(logits[b : b + 1], params[b : b + 1], noise[b : b + 1], history[b : b + 1])
        assert (alone[0][0], alone[1][0]) == (tokens[b], logps[b])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    n, size = 20_000, 12
    logits = torch.randn(size, generator=torch.Generator().manual_seed(5))
    noise = uniforms(3, f"chi-square {temperature}", 0, n).tolist()
    params = [SamplingParams(max_tokens=1, temperature=temperature)] * n
    tokens, _, _ = sample(logits.expand(n, size), params, noise, [[0]] * n)
    expected = n * (logits.double() / temperature).softmax(-1)
    statistic = ((tokens.bincount(minlength=size) - expected) ** 2 / expected).sum()
    assert statistic < 31.3  # 11 degrees of freedom, 0.1 %


def test_draws_follow_the_truncated_distribution_and_only_that() -> None:
    n, size = 20_000, 12
    logits = torch.randn(size, generator=torch.Generator().manual_seed(6))
    p = SamplingParams(max_tokens=1, temperature=1.3, top_k=7, top_p=0.9, min_p=0.1)
    tokens, logps, _ = sample(
        logits.expand(n, size), [p] * n, uniforms(3, "truncated", 0, n).tolist(), [[0]] * n
    )
    probs = slow_distribution(logits.numpy(), p, [])
    kept = probs > 0
    assert 1 < kept.sum() < 7
    counts = np.bincount(tokens.numpy(), minlength=size)
    assert counts[~kept].sum() == 0
    statistic = ((counts - n * probs)[kept] ** 2 / (n * probs[kept])).sum()
    assert statistic < 20.5  # at most 5 degrees of freedom, 0.1 %
    assert np.allclose(logps.exp().numpy(), probs[tokens.numpy()], atol=1e-6)


def test_recorded_log_prob_is_the_log_softmax_of_the_tempered_logits() -> None:
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    noise = uniforms(0, "logp", 0, 64).tolist()
    tokens, logps, _ = sample(
        logits, [SamplingParams(max_tokens=1, temperature=0.7)] * 64, noise, [[0]] * 64
    )
    expected = (logits / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(
        logps, expected, rtol=0, atol=1e-6
    )  # the kernel sums in another order than log_softmax


@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_noise_never_draw_an_impossible_token(u: float) -> None:
    impossible = float("-inf")
    logits = torch.tensor([[impossible, impossible, 0.0, 0.0, impossible, impossible]])
    token, logp, _ = sample(logits, [SamplingParams(max_tokens=1)], [float(u)], [[0]])
    assert token.item() == (2 if u == 0.0 else 3)
    assert logp.item() == pytest.approx(math.log(0.5))


def test_rare_tokens_of_a_large_vocabulary_can_be_drawn() -> None:
    """50,000 tokens that share one part in a thousand, 2e-8 each: a float32 running sum near 1
    would skip two of three.
    """
    logits = torch.full((1, 50_001), math.log(0.001 / 50_000))
    logits[0, 0] = math.log(0.999)
    noise = [0.9995 + 2e-8 * k for k in range(12)]
    tokens, _, _ = sample(
        logits.expand(12, -1), [SamplingParams(max_tokens=1)] * 12, noise, [[0]] * 12
    )
    assert tokens.diff().tolist() == [1] * 11


def test_greedy_takes_the_best_and_records_its_probability_at_temperature_1() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token, logp, _ = sample(logits, [SamplingParams(max_tokens=1, temperature=0.0)], [0.999], [[0]])
    assert token.item() == 1
    assert logp.item() == pytest.approx(3 - math.log(math.e + math.e**3 + math.e**2), abs=1e-6)
