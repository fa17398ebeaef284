"""The record of experts equals that of one forward pass, however a sequence was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.models.experts import expert_model
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.routes import RecordedModel
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM, Segments, hidden_states
from sixfold.model.experts import Routers, find_routers
from sixfold.types import Routes, SamplingParams

PROMPTS = [[3, 9, 27, 20, 60, 58, 52, 34, 41, 7, 11], [3, 9, 27, 20, 60, 58, 52, 34, 5], [8]]


def routers_of(model: PreTrainedModel) -> Routers:
    routers = find_routers(model)
    assert routers is not None
    return routers


def recording(model: PreTrainedModel, **options: Any) -> Engine:
    options = {"kv_tokens": 400, "block_size": 4, "max_running": 8} | options
    return Engine(RecordedModel(CausalLM(model), routers_of(model)), **options)


def sampled(engine: Engine, tokens: int = 14, rounds: int = 1) -> list[Sequence]:
    found = []
    for seed in range(rounds):
        for i, prompt in enumerate(PROMPTS):
            engine.add(f"t{i}", prompt, SamplingParams(tokens, seed=seed), [0, 1, 2])
        while engine.busy:
            found += engine.step()
    return found


def numbers(routes: Routes | None) -> np.ndarray:
    assert routes is not None
    flat = np.frombuffer(routes.data, dtype=f"<u{routes.width}")
    return flat.reshape(len(routes), routes.layers, routes.top_k).astype(np.int64)


@torch.no_grad()
def assert_true(model: PreTrainedModel, sequences: list[Sequence]) -> None:
    """Check that each record equals that of one forward pass of the plain model."""
    routers = routers_of(model)
    for s in sequences:
        tokens = torch.tensor(s.tokens)
        n = len(tokens)
        with routers.watch(model) as record:
            hidden_states(model, tokens, torch.arange(n), Segments(((0, n),)))
        expected = record.choices()[:-1].sort(-1)[0].numpy()
        assert np.array_equal(np.sort(numbers(s.routes), -1), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "jetmoe"])
def test_record_is_that_of_one_forward_pass(name: str) -> None:
    model = expert_model(name)
    sequences = sampled(recording(model))
    assert len(sequences) == 9
    assert_true(model, sequences)


@pytest.mark.mostly_nightly(3)
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": "radix"},
        {"prefix_cache": "hash"},
        {"chunked_prefill": True, "prefill_tokens": 5},
        {"kv_tokens": 100, "preemption": "recompute"},
        {"kv_tokens": 100, "preemption": "swap"},
        {"speculation": Speculation(3, None, 1, 2)},
    ],
    ids=str,
)
def test_record_survives_caching_and_preemption(options: dict[str, Any]) -> None:
    """There are two rounds, so that the prompts of the second are cached."""
    model = expert_model("qwen3_moe")
    engine = recording(model, **options)
    sequences = sampled(engine, tokens=24, rounds=2)
    if "kv_tokens" in options:
        assert engine.stats.preemptions > 0
    if "prefix_cache" in options:
        assert any(s.reused for s in sequences)
    assert_true(model, sequences)


def test_recording_changes_no_token() -> None:
    model = expert_model("qwen3_moe")
    plain = sampled(Engine(CausalLM(model), kv_tokens=400, block_size=4, max_running=8))
    recorded = sampled(recording(model))
    assert [(s.tokens, s.logp) for s in plain] == [(s.tokens, s.logp) for s in recorded]
    assert all(s.routes is None for s in plain)


def test_record_in_bfloat16_is_that_of_the_lowered_weights() -> None:
    model = expert_model("qwen3_moe")
    engine = recording(model, autocast=torch.bfloat16)
    sequences = sampled(engine)
    exact = sampled(recording(model))
    assert all(len(numbers(s.routes)) == len(s.tokens) - 1 for s in sequences)
    same = [
        np.array_equal(numbers(a.routes)[:4], numbers(b.routes)[:4])
        for a, b in zip(sequences, exact, strict=True)
    ]
    assert any(same)


def test_an_ended_sequence_keeps_the_experts_of_its_tokens() -> None:
    engine = recording(expert_model("qwen3_moe"))
    engine.add("t", PROMPTS[0], SamplingParams(20), [0])
    for _ in range(6):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.end(sequence, "stop")
    assert len(numbers(sequence.routes)) == len(sequence.tokens) - 1
    sequence.cut(13)
    assert len(numbers(sequence.routes)) == 13


def test_later_turns_add_to_the_record() -> None:
    first, later = Routes(1, 2, 1, bytes([1, 2, 3, 4])), Routes(1, 2, 1, bytes([9, 9, 9, 9, 5, 6]))
    assert first.grown(later) == Routes(1, 2, 1, bytes([1, 2, 3, 4, 5, 6]))
    assert later.cut(1) == Routes(1, 2, 1, bytes([9, 9]))
    assert Routes.from_record(later.to_record()) == later
