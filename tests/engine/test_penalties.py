"""Presence and frequency penalties by OpenAI's formula, whatever runs beside a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sampler import distribution
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams


def by_hand(
    logits: list[float],
    completion: list[int],
    presence: float,
    frequency: float,
    temperature: float,
) -> list[float]:
    counts = Counter(completion)
    adjusted = [
        (x - (presence if counts[t] else 0.0) - frequency * counts[t]) / temperature
        for t, x in enumerate(logits)
    ]
    total = math.log(sum(map(math.exp, adjusted)))
    return [x - total for x in adjusted]


def test_the_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, counted in the completion and not in the
    prompt.
    """
    logits = [[0.5, -1.0, 2.0, 0.0, 1.5]]
    history = [[2, 2, 0, 1, 1, 1, 4]]  # a prompt of 3
    params = SamplingParams(
        max_tokens=9, temperature=0.5, presence_penalty=0.7, frequency_penalty=0.3, counted_from=3
    )
    logp, _ = distribution(torch.tensor(logits), [params], history)
    assert logp[0].tolist() == pytest.approx(
        by_hand(logits[0], history[0][3:], 0.7, 0.3, 0.5), abs=1e-6
    )


def test_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 30)
    params = [
        SamplingParams(9, presence_penalty=1.0),
        SamplingParams(9),
        SamplingParams(9, 0.3, frequency_penalty=-0.5, repetition_penalty=1.3, counted_from=2),
        SamplingParams(9, top_k=4, presence_penalty=-2.0),
    ]
    history = [[1, 1, 2], [3], [4, 5, 4, 4], [7, 8, 9]]
    together, _ = distribution(logits, params, history)
    for b in range(4):
        alone, _ = distribution(logits[b : b + 1], params[b : b + 1], history[b : b + 1])
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("speculation", [None, Speculation(k=3)])
def test_the_recorded_logp_is_of_the_penalised_distribution(
    tiny: Callable[[str], PreTrainedModel], speculation: Speculation | None
) -> None:
    prompt = [5, 9, 11, 5, 9, 11, 5]
    params = SamplingParams(24, 0.9, presence_penalty=0.5, frequency_penalty=0.4, seed=5)
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=600, speculation=speculation)
    engine.add("a", prompt, params, [0])
    engine.add("b", prompt, replace(params, presence_penalty=0.0, frequency_penalty=0.0), [0])
    penalised, free = sorted(engine.run(), key=lambda s: s.request.key)
    with torch.no_grad():
        logits = tiny("qwen3")(torch.tensor([penalised.tokens])).logits[0].float()
    for i, (token, logp) in enumerate(
        zip(penalised.tokens[len(prompt) :], penalised.logp, strict=True)
    ):
        completion = penalised.tokens[len(prompt) : len(prompt) + i]
        expected = by_hand(logits[len(prompt) - 1 + i].tolist(), completion, 0.5, 0.4, 0.9)
        assert logp == pytest.approx(expected[token], abs=2e-4)
    assert max(Counter(penalised.tokens[len(prompt) :]).values()) <= max(
        Counter(free.tokens[len(prompt) :]).values()
    )


def test_a_large_frequency_penalty_never_repeats(tiny: Callable[[str], PreTrainedModel]) -> None:
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=600)
    engine.add("a", [5, 5, 5], SamplingParams(40, 0.0, frequency_penalty=1e4), [0])
    (sequence,) = engine.run()
    assert len(set(sequence.tokens[3:])) == 40
