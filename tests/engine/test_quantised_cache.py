"""The int8 KV cache: its error bound, its bytes, how far it moves log-probs, and that it keeps
every promise of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import ARCHITECTURES, VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.quantised_cache import Int8KVCache, dequantise, quantise
from sixfold.model.causal_lm import CausalLM
from sixfold.rollout.kv_probe import LIMIT, check_int8_kv, exact_logp, kv_deviation
from sixfold.types import SamplingParams


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=6, max_size=6),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=200, deadline=None)
def test_no_number_moves_by_more_than_half_a_scale(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    numbers, scale = quantise(x)
    gap = (numbers.double() * scale.double() - x.double()).abs()
    assert (
        gap <= scale.double() / 2 * (1 + 2**-16)
    ).all()  # the quotient is rounded to float32 before it is rounded to a whole number
    assert torch.equal(scale[:, 0], (x.abs().amax(-1) / 127).clamp_min(1e-30))
    assert (numbers.abs().amax(-1) == 127).logical_or(x.abs().amax(-1) < 1e-28).all()


def test_quantise_by_hand() -> None:
    numbers, scale = quantise(
        torch.tensor([[-12.7, 0.04, 0.06, 3.0], [0.0, 0.0, 0.0, 0.0], [254.0, -1.0, 1.0, -254.0]])
    )
    assert numbers.tolist() == [[-127, 0, 1, 30], [0, 0, 0, 0], [127, 0, 1, -127]]  # halves go up
    torch.testing.assert_close(scale, torch.tensor([[0.1], [1e-30], [2.0]]))
    torch.testing.assert_close(
        dequantise(numbers, scale, torch.float32)[0], torch.tensor([-12.7, 0.0, 0.1, 3.0])
    )


def test_a_number_that_is_none_stays_visible() -> None:
    """A broken value must not come back as a healthy zero."""
    for bad in (float("nan"), float("inf")):
        numbers, scale = quantise(torch.tensor([[1.0, bad]]))
        assert not dequantise(numbers, scale, torch.float32).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, (64 + 4) / 256), (torch.bfloat16, (64 + 4) / 128)]
)
def test_it_takes_a_quarter_of_float32_and_half_of_bfloat16(
    dtype: torch.dtype, share: float
) -> None:
    """And 4 bytes a row for the scales."""
    from sixfold.engine.kv_cache import KVCache

    sizes = []
    for kind in (KVCache, Int8KVCache):
        cache = kind(3, 8)
        cache.write(
            0,
            torch.randn(2, 5, 64, dtype=dtype),
            torch.randn(2, 5, 64, dtype=dtype),
            torch.arange(5),
        )
        sizes.append(sum(side.nbytes for side in cache.tensors()))
    assert sizes[0] == 2 * 2 * 4 * 8 * 64 * dtype.itemsize
    assert sizes[1] == share * sizes[0]


def test_blocks_are_copied_with_their_scales() -> None:
    torch.manual_seed(0)
    cache = Int8KVCache(3, 4)
    k, v = torch.randn(2, 4, 8), 5 * torch.randn(2, 4, 6)
    cache.write(0, k, v, torch.arange(4, 8))
    cache.copy_blocks([(1, 2)])
    keys, values = cache.read(0, lambda pool: pool[:, 2])
    for x, back in ((k, keys), (v, values)):
        assert torch.equal(back, dequantise(*quantise(x), torch.float32))
        assert 0 < (back - x).abs().max() < x.abs().max() / 250


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_move_by_little(
    name: str, tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models with distributions far from flat: hundredths of a nat. A mixture of experts may
    take another expert, so only its mean counts.
    """
    model = CausalLM(tiny(name))
    engine = Engine(model, kv_tokens=500, kv_dtype="int8")
    for i in range(5):
        engine.add(str(i), [7 * i], SamplingParams(max_tokens=40), [0])
    gaps = torch.cat(
        [(torch.tensor(s.logp) - exact_logp(model, s.tokens, None)).abs() for s in engine.run()]
    )
    assert 1e-4 < gaps.mean() < 0.01
    assert gaps.max() < 0.1 or name == "qwen3_moe"
    monkeypatch.setattr("sixfold.rollout.kv_probe.TOKENS", 40)
    assert kv_deviation(model, [[0]]) == pytest.approx(float(gaps[:40].max()), abs=0.1)


@pytest.mark.slow
def test_the_probe_refuses_a_model_that_an_int8_cache_moves_too_far(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large number in each key takes the scale for itself, and the others are rounded away:
    what happens to real models with outliers.
    """
    import copy

    prompts = [[3], [9, 4]]
    assert 0 < check_int8_kv(CausalLM(tiny("llama")), prompts) < LIMIT
    broken = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        for layer in broken.model.layers:
            # Numbers 7 and 15 of a head turn together, slowly: every key gets nearly the same large
            # pair, which softmax does not see.
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(32))
            layer.self_attn.k_proj.bias[[7, 23]] = 3000.0
    with pytest.raises(
        ValueError, match=r"int8 KV cache changes this model's log-probs by .* nats \(limit 0.2\)"
    ):
        check_int8_kv(CausalLM(broken), prompts)
    monkeypatch.setattr("sixfold.rollout.kv_probe.LIMIT", 1e-6)
    with pytest.raises(ValueError, match="limit 1e-06"):
        check_int8_kv(CausalLM(tiny("llama")), prompts)


PROMPTS = [
    [(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)] for i, n in enumerate((1, 8, 17, 33, 70))
] + [[2] * 20, [2] * 16 + [3] * 9]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_same_tokens_in_any_schedule(name: str, tiny: Callable[[str], PreTrainedModel]) -> None:
    """A key is rounded once, as it is written, and what computes it reads it rounded too: cached or
    not, in one piece or several, anew or not.
    """

    def draw(order: list[int], **sizes: object) -> tuple[dict, Engine]:
        engine = Engine(CausalLM(tiny(name)), **{"kv_tokens": 2000, "kv_dtype": "int8", **sizes})  # type: ignore[arg-type]
        for i in order:
            engine.add(str(i), PROMPTS[i], SamplingParams(max_tokens=12, seed=3), [0, 1])
        return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}, engine

    order = list(range(len(PROMPTS)))
    expected, _ = draw(order)
    exact, _ = draw(order, kv_dtype="auto")
    assert all(drawn[1] != exact[key][1] for key, drawn in expected.items())
    for sizes in (
        dict(prefix_cache="none", block_size=5),
        dict(prefix_cache="hash", max_running=3, block_size=4),
        dict(chunked_prefill=True, prefill_tokens=9, block_size=8),
        dict(kv_tokens=120, block_size=4, preemption="recompute"),
        dict(
            kv_tokens=110,
            block_size=4,
            preemption="recompute",
            chunked_prefill=True,
            prefill_tokens=20,
            prefix_cache="none",
        ),
        dict(kv_tokens=120, block_size=4, preemption="swap"),
    ):
        drawn, engine = draw(order[::-1], **sizes)
        assert drawn == expected, sizes
        assert (engine.stats.preemptions > 0) == bool(sizes.get("preemption"))
        assert (engine.stats.brought_back_bytes > 0) == (sizes.get("preemption") == "swap")
