"""Guarantees of the engine, once on the compiled kernels and once on PyTorch's operations alone,
and the two against each other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.conftest import END, VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sampler import sample
from sixfold.kernels.cpu.engine_kernels import cpu_kernels
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPTS = [
    [(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)]
    for i, n in enumerate((1, 7, 16, 17, 33, 70))
]
SCHEDULES: list[dict[str, object]] = [
    dict(max_running=1, prefix_cache="none"),
    dict(block_size=5, max_running=7),
    dict(chunked_prefill=True, prefill_tokens=23, block_size=8),
    dict(preemption="recompute", kv_tokens=130, block_size=4, prefix_cache="hash"),
]
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]
NAMES = ["qwen3", "gemma2"]
"""One that is written out, one that runs as its module under the kernels' attention."""


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_KERNELS", "" if way == "compiled" else "torch")
    cpu_kernels.cache_clear()
    if way == "compiled" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    assert (cpu_kernels() is not None) == (way == "compiled")


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    choose(request.param, monkeypatch)
    yield request.param
    monkeypatch.undo()
    cpu_kernels.cache_clear()


def draw(model: PreTrainedModel, **sizes: object) -> Drawn:
    engine = Engine(CausalLM(model), **{"kv_tokens": 2000, **sizes})  # type: ignore[arg-type]
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=15, temperature=0.8 if i % 2 else 1.0, stop_token_ids=(END,), seed=4
        )
        engine.add(f"task-{i}", prompt, params, [0, 1])
    drawn = {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}
    assert bool(engine.stats.preemptions) == ("preemption" in sizes)
    return drawn


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_the_full_forward(
    name: str,
    way: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
) -> None:
    for (key, _), (tokens, logp) in draw(tiny(name)).items():
        task = int(key.removeprefix("task-"))
        with torch.no_grad():
            full = plain(name)(torch.tensor([tokens]), use_cache=False).logits[0].float() / (
                0.8 if task % 2 else 1.0
            )
        start = len(PROMPTS[task])
        expected = (
            full[start - 1 : -1]
            .log_softmax(-1)
            .gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(logp), expected, rtol=0, atol=1e-5)


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_draws_the_same_bits(
    name: str, way: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    reference = draw(tiny(name))
    for sizes in SCHEDULES:
        assert draw(tiny(name), **sizes) == reference, sizes


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", NAMES)
def test_both_paths_sample_the_same_tokens(
    name: str, tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}
    try:
        for way in ("compiled", "torch"):
            choose(way, monkeypatch)
            drawn[way] = draw(tiny(name))
    finally:
        monkeypatch.undo()
        cpu_kernels.cache_clear()
    for key, (tokens, logp) in drawn["compiled"].items():
        assert drawn["torch"][key][0] == tokens
        assert drawn["torch"][key][1] == pytest.approx(logp, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_of_another_dtype_are_not_read_as_single_precision(dtype: torch.dtype) -> None:
    logits = (
        torch.linspace(-3, 3, 37)[torch.randperm(37, generator=torch.Generator().manual_seed(0))]
        .repeat(2, 1)
        .to(dtype)
    )
    drawn = sample(
        logits, [SamplingParams(max_tokens=1, temperature=0.0)] * 2, [0.5, 0.5], [[0], [0]]
    )
    assert drawn.token.tolist() == [int(logits[0].argmax())] * 2
