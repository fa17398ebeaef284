"""Same seed, same tokens and the same bits of log-prob, whatever the engine's sizes and switches,
the order of arrival and the company.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.conftest import END, VOCABULARY
from tests.engine.drain import drain
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.noise import uniforms
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.engine.stats import EngineStats
from sixfold.kernels.cpu.engine_kernels import cpu_kernels
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPTS = [
    [(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)]
    for i, n in enumerate((1, 7, 8, 15, 16, 17, 33))
]
PROMPTS += [
    [*PROMPTS[6], 7, 8, 9],
    [*PROMPTS[6][:20], 4, 4],
    [(3 * j * j + 2) % VOCABULARY for j in range(150)],
]
PROMPTS += [PROMPTS[9][:130] + [11] * 5, list(PROMPTS[9])]
"""Some begin alike, one is another's twin; the long ones are more than two tiles of a prefill."""
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


def draw(
    model: PreTrainedModel, order: list[int], seed: int = 2, alone: bool = False, **sizes: object
) -> Drawn:
    """Tokens and log-probs by (task, sample); alone: one request after another."""
    return draw_and_count(model, order, seed, alone, **sizes)[0]


def draw_and_count(
    model: PreTrainedModel, order: list[int], seed: int = 2, alone: bool = False, **sizes: object
) -> tuple[Drawn, EngineStats]:
    engine = Engine(CausalLM(model), **{"kv_tokens": 4000, **sizes})  # type: ignore[arg-type]
    drawn: Drawn = {}
    for i in order:
        # Every third prompt asks for other parameters: mixed rows in one batch.
        params = SamplingParams(
            max_tokens=20,
            temperature=0.7 if i % 3 else 1.0,
            top_p=1.0 if i % 3 else 0.9,
            stop_token_ids=(END,),
            seed=seed,
        )
        engine.add(f"task-{i}", PROMPTS[i], params, [0, 1])
        if alone:
            drawn |= {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}
    drawn |= {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}
    return drawn, engine.stats


SIZES: list[dict[str, object]] = [
    dict(prefix_cache="none"),
    dict(continuous=False, max_running=5),
    dict(
        continuous=False,
        max_running=20,
        chunked_prefill=True,
        prefill_tokens=40,
        preemption="recompute",
        kv_tokens=240,
        block_size=8,
    ),
    dict(max_running=1),
    dict(max_running=2, block_size=4, prefix_cache="hash"),
    dict(max_running=7, block_size=64),
    dict(block_size=1),
    dict(block_size=5, max_running=20, prefix_cache="none"),
    dict(prefill_tokens=1),
    dict(prefill_tokens=23, block_size=8),
    dict(kv_tokens=190),
    dict(kv_tokens=300, block_size=3, max_running=9),
    dict(chunked_prefill=True, prefill_tokens=40),
    dict(chunked_prefill=True, prefill_tokens=7, block_size=8, prefix_cache="none"),
    dict(preemption="recompute", kv_tokens=240, block_size=8),
    dict(preemption="recompute", kv_tokens=190, block_size=4, prefix_cache="none"),
    dict(
        preemption="recompute",
        kv_tokens=210,
        block_size=4,
        prefix_cache="hash",
        chunked_prefill=True,
        prefill_tokens=33,
    ),
    dict(
        preemption="recompute", kv_tokens=200, block_size=3, chunked_prefill=True, prefill_tokens=50
    ),
    dict(preemption="swap", kv_tokens=240, block_size=8, host_tokens=4000),
    dict(
        preemption="swap",
        kv_tokens=200,
        block_size=3,
        prefix_cache="none",
        host_tokens=60,
        chunked_prefill=True,
        prefill_tokens=50,
    ),
]


UNSHARED = sum(len(prompt) for prompt in PROMPTS)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("gemma2", 3), ("qwen3", 1), ("gpt2", 3)])
def test_trajectories_do_not_depend_on_the_engine(
    name: str, every: int, tiny: Callable[[str], PreTrainedModel]
) -> None:
    order = list(range(len(PROMPTS)))
    reference = draw(tiny(name), order)
    assert len({tuple(tokens) for tokens, _ in reference.values()}) == 2 * len(PROMPTS)
    for i, sizes in list(enumerate(SIZES))[::-every]:
        random.Random(i).shuffle(order)
        drawn, stats = draw_and_count(tiny(name), order, **sizes)
        assert drawn == reference, sizes
        # Or the equality would be that of nothing with nothing.
        assert (stats.prefill_tokens < UNSHARED) == (
            sizes.get("prefix_cache") != "none"
        ) or sizes.get("preemption")
        assert (stats.preemptions > 0) == bool(sizes.get("preemption"))
        assert (stats.recomputed_tokens > 0) == (
            stats.preemptions > 0 and sizes.get("host_tokens") != 4000
        )
        assert (stats.brought_back_bytes > 0) == (sizes.get("preemption") == "swap")
    assert draw(tiny(name), order, alone=True) == reference


def test_a_conversation_goes_on_as_if_computed_anew(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Turns on cached blocks: the same tokens. The same log-probs where the CPU kernels serve, to
    rounding elsewhere: there a token that was sampled attends by other operations than one of a
    prompt."""
    talks: dict[str, list[tuple[list[int], list[float]]]] = {}
    for kind in ("none", "radix", "hash"):
        engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=2000, block_size=8, prefix_cache=kind)
        text, talks[kind] = PROMPTS[6], []
        for turn in range(4):
            engine.add(f"turn-{turn}", text, SamplingParams(max_tokens=20, seed=turn), [0])
            (s,) = drain(engine) if turn else engine.run()
            talks[kind].append((s.tokens, s.logp))
            text = [*s.tokens, 5, 6, 7, 8, 9]
    for kind in ("radix", "hash"):
        assert [tokens for tokens, _ in talks[kind]] == [tokens for tokens, _ in talks["none"]]
        for (_, logp), (_, expected) in zip(talks[kind], talks["none"], strict=True):
            assert logp == (expected if cpu_kernels() else pytest.approx(expected, abs=1e-5))


@pytest.mark.slow
def test_mixtures_of_experts_draw_the_same_tokens(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Log-probs to rounding only: how many rows an expert gets depends on the company, and kernels
    for very few rows round in their own way.
    """
    reference = draw(tiny("qwen3_moe"), [0, 2, 4, 6])
    for sizes in (
        dict(max_running=1),
        dict(block_size=5, max_running=4),
        dict(kv_tokens=90, preemption="recompute", chunked_prefill=True, prefill_tokens=9),
    ):
        other = draw(tiny("qwen3_moe"), [6, 2, 0, 4], **sizes)
        assert {k: v[0] for k, v in other.items()} == {k: v[0] for k, v in reference.items()}
        for key, (_, logp) in reference.items():
            assert other[key][1] == pytest.approx(logp, abs=1e-5)


def test_another_seed_draws_other_tokens(tiny: Callable[[str], PreTrainedModel]) -> None:
    first, second = draw(tiny("qwen3"), [3, 4], seed=2), draw(tiny("qwen3"), [3, 4], seed=3)
    assert all(first[key][0] != second[key][0] for key in first)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"preemption": "recompute", "kv_tokens": 96, "block_size": 4, "prefix_cache": "none"},
        {"draft": True},
    ],
    ids=["plain", "preempted", "draft"],
)
def test_noise_belongs_to_a_position(
    sizes: dict[str, Any], tiny: Callable[[str], PreTrainedModel]
) -> None:
    """A completion cut anywhere and given as a prompt with the same origin goes on as it did; with
    an origin of its own it draws other noise. A token at position p is drawn with noise p - origin.
    """
    sizes = dict(sizes)
    model = CausalLM(tiny("qwen3"))
    if sizes.pop("draft", False):
        sizes["speculation"] = Speculation(k=3, draft=CausalLM(tiny("llama")))
    engine = Engine(model, **{"kv_tokens": 4000, **sizes})
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=5)

    def drawn(*asked: tuple[list[int], int, int | None]) -> list[Sequence]:
        requests = [
            engine.add("t", prompt, replace(params, max_tokens=n), [2], origin=origin)
            for prompt, n, origin in asked
        ]
        ended = {s.request: s for s in engine.run()}
        return [ended[request] for request in requests]

    prompt = PROMPTS[3]
    (whole,) = drawn((prompt, 24, None))
    expected = uniforms(5, "t", 2, 24)
    assert whole.noise == expected.tolist()
    cuts = [(whole.tokens[: len(prompt) + n], 24 - n) for n in (1, 7, 20)]
    # Company, so that some sequences are preempted.
    company = [(PROMPTS[6], 24, None)]
    later = drawn(*((start, n, len(prompt)) for start, n in cuts), *company)
    for (_, n), s in zip(cuts, later, strict=False):
        assert s.noise == expected[24 - n :].tolist()
        if engine.speculator is None:
            assert s.tokens == whole.tokens
        else:  # the first token after a prompt is not one that a draft model proposed
            assert np.array_equal(
                engine.speculator._streams(s)[1],
                uniforms(5, "t", 2, 24, "residual")[24 - n :],
            )
    fresh = drawn(*((start, n, None) for start, n in cuts))
    assert all(s.noise == expected[: len(s.noise)].tolist() for s in fresh)
    assert [s.tokens for s in fresh] != [whole.tokens] * 3
    with pytest.raises(ValueError, match="origin"):
        engine.add("t", prompt, params, [0], origin=len(prompt) + 1)
    if "kv_tokens" in sizes:
        assert engine.stats.preemptions > 0
