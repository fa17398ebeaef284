"""Same seed, same tokens and the same bits of log-prob, whatever the engine's sizes, the order of arrival and the company."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.conftest import END, VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.types import SamplingParams

PROMPTS = [[(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)] for i, n in enumerate((1, 7, 8, 15, 16, 17, 33))]
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


def draw(model: PreTrainedModel, order: list[int], seed: int = 2, alone: bool = False, **sizes: int) -> Drawn:
    """Tokens and log-probs by (task, sample); alone: one request after another."""
    engine = Engine(model, **{"kv_tokens": 4000, **sizes})  # type: ignore[arg-type]
    drawn: Drawn = {}
    for i in order:
        # Every third prompt asks for other parameters: mixed rows in one batch.
        params = SamplingParams(max_tokens=24, temperature=0.7 if i % 3 else 1.0, top_p=1.0 if i % 3 else 0.9, stop_token_ids=(END,), seed=seed)
        engine.add(f"task-{i}", PROMPTS[i], params, [0, 1])
        if alone:
            drawn |= {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}
    return drawn | {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}


SIZES: list[dict[str, int]] = [
    dict(max_running=1),
    dict(max_running=2, block_size=4),
    dict(max_running=7, block_size=64),
    dict(block_size=1),
    dict(block_size=5, max_running=20),
    dict(prefill_tokens=1),
    dict(prefill_tokens=23, block_size=8),
    dict(kv_tokens=57),
    dict(kv_tokens=200, block_size=3, max_running=9),
]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_trajectories_do_not_depend_on_the_engine(name: str, tiny: Callable[[str], PreTrainedModel]) -> None:
    order = list(range(len(PROMPTS)))
    reference = draw(tiny(name), order)
    assert len({tuple(tokens) for tokens, _ in reference.values()}) == 2 * len(PROMPTS)
    for i, sizes in enumerate(SIZES):
        random.Random(i).shuffle(order)
        assert draw(tiny(name), order, **sizes) == reference, sizes
    assert draw(tiny(name), order, alone=True) == reference


def test_mixtures_of_experts_draw_the_same_tokens(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Log-probs to rounding only: how many rows an expert gets depends on the company, and kernels for very few rows round in their own way."""
    reference = draw(tiny("qwen3_moe"), [0, 2, 4, 6])
    for sizes in (dict(max_running=1), dict(block_size=5, max_running=4)):
        other = draw(tiny("qwen3_moe"), [6, 2, 0, 4], **sizes)
        assert {k: v[0] for k, v in other.items()} == {k: v[0] for k, v in reference.items()}
        for key, (_, logp) in reference.items():
            assert other[key][1] == pytest.approx(logp, abs=1e-5)


def test_another_seed_draws_other_tokens(tiny: Callable[[str], PreTrainedModel]) -> None:
    first, second = draw(tiny("qwen3"), [3, 4], seed=2), draw(tiny("qwen3"), [3, 4], seed=3)
    assert all(first[key][0] != second[key][0] for key in first)
