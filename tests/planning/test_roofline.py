"""FLOPs, tokens per second, roofline and collectives: published numbers."""

from __future__ import annotations

import pytest

from sixfold_planning.collectives import all_gather_seconds, all_reduce_seconds, broadcast_seconds
from sixfold_planning.flops import (
    FORWARD,
    RECOMPUTED,
    TRAINING,
    attention_flops_per_token,
    flops_per_token,
    model_flops_utilisation,
    tokens_per_second,
)
from sixfold_planning.roofline import (
    INTENSITY,
    decode_step,
    expert_share,
    knee,
    prefill_knee,
    role_limit,
)

H100 = {"flops_per_second": 989e12, "bytes_per_second": 3.35e12}


@pytest.mark.parametrize(("billions", "expected"), [(7, 19.0e3), (70, 1.9e3), (405, 329)])
def test_training_tokens_per_second(billions: int, expected: float) -> None:
    """L22: an H100 at 800 TFLOPs."""
    flops = flops_per_token(billions * 1e9, TRAINING)
    assert tokens_per_second(flops, flops_per_second=800e12) == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize(("factor", "expected"), [(FORWARD, 14e9), (TRAINING, 42e9)])
def test_flops_per_token(factor: int, expected: float) -> None:
    """L22: 2P forward, 6P training; full recomputation adds a forward pass: 8P."""
    assert flops_per_token(7e9, factor) == expected
    assert flops_per_token(7e9, RECOMPUTED) == 56e9


def test_flops_of_one_batch() -> None:
    """L28: 7B and 32k tokens are 1.3 PFLOP: 1.6 s on one H100 and 0.2 s on eight."""
    flops = 32_000 * flops_per_token(7e9, TRAINING)
    assert flops / 1e15 == pytest.approx(1.3, abs=0.05)
    assert flops / 800e12 == pytest.approx(1.6, abs=0.1)
    assert flops / 800e12 / 8 == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("length", "causal", "gigaflops"),
    [(4096, True, 48.250774), (4096, False, 51.471999), (32768, True, 70.799352)],
)
def test_training_flops_of_llama_3_8b(length: int, causal: bool, gigaflops: float) -> None:
    """Megatron-LM's count: matrix products without the input embedding, and attention."""
    weights = 8_030_261_248 - 128_256 * 4096
    attention = attention_flops_per_token(
        layers=32, heads=32, key_dim=128, value_dim=128, length=length, causal=causal
    )
    norms = 65 * 4096
    total = flops_per_token(weights - norms, TRAINING) + 3 * attention
    assert total / 1e9 == pytest.approx(gigaflops, rel=1e-4)


def test_utilisation() -> None:
    """800 of 989 TFLOPs are a utilisation of 81 %."""
    flops = flops_per_token(7e9, TRAINING)
    rate = tokens_per_second(flops, flops_per_second=4 * 800e12)
    found = model_flops_utilisation(flops=flops, tokens_per_second=rate, devices=4, peak=989e12)
    assert found == pytest.approx(800 / 989)


def test_knee_of_an_h100() -> None:
    """L22a: 989 TFLOPs and 3.35 TB/s; 295 tokens of a bfloat16 prefill."""
    assert knee(**H100) == pytest.approx(295.2, abs=0.05)
    assert prefill_knee(**H100, width=2) == pytest.approx(295.2, abs=0.05)
    assert prefill_knee(**H100, width=1) == pytest.approx(147.6, abs=0.05)


@pytest.mark.parametrize(
    ("role", "limit"),
    [
        ("decode", "memory"),
        ("reference", "memory"),
        ("prefill", "memory"),
        ("trainer", "compute"),
        ("sync", "network"),
    ],
)
def test_limit_of_each_role(role: str, limit: str) -> None:
    """L22a: intensities of about 1, 3, 100 to 150 and 400 against a knee of 295."""
    assert role_limit(role, **H100) == limit


def test_compute_is_the_limit_at_the_knee() -> None:
    at_the_knee = {"flops_per_second": 400.0, "bytes_per_second": 1.0}
    assert role_limit("trainer", **at_the_knee) == "compute"


def test_intensities() -> None:
    """L22a: decode 1, reference 3, prefill 100 to 150, trainer 400; sync has none."""
    assert (INTENSITY["decode"], INTENSITY["reference"], INTENSITY["trainer"]) == (1, 3, 400)
    assert INTENSITY["prefill"] == (100 + 150) / 2


@pytest.mark.parametrize(
    ("sequences", "seconds", "tokens"),
    [(1, 0.004874, 205.156998), (32, 0.007358, 4348.803741), (256, 0.025307, 10115.593392)],
)
def test_decode_step_of_llama_3_8b(sequences: int, seconds: float, tokens: float) -> None:
    """maths.md, section D: bfloat16, an H100, 2,048 tokens of context."""
    step = decode_step(
        weight_bytes=2 * 8_030_261_248,
        active_parameters=8_030_261_248,
        sequences=sequences,
        context=2048,
        kv_bytes_per_token=131_072,
        **H100,
    )
    assert step.seconds == pytest.approx(seconds, abs=1e-6)
    assert step.tokens_per_second == pytest.approx(tokens, rel=1e-6)


@pytest.mark.parametrize("efficiency", [0.7, 0.85])
def test_decode_of_32_sequences(efficiency: float) -> None:
    """L28: 7B, 2,048 tokens of context: 3k to 4k tokens per second, about 100 per sequence."""
    step = decode_step(
        weight_bytes=14e9,
        active_parameters=7e9,
        sequences=32,
        context=2048,
        kv_bytes_per_token=131_072,
        flops_per_second=989e12,
        bytes_per_second=efficiency * 3.35e12,
    )
    assert 3000 <= step.tokens_per_second <= 4100
    assert step.tokens_per_second / 32 == pytest.approx(100, rel=0.3)


def test_decode_without_cache_reads_is_limited_by_compute_at_large_batches() -> None:
    step = decode_step(
        weight_bytes=2e9,
        active_parameters=1e9,
        sequences=1000,
        context=0,
        kv_bytes_per_token=0,
        **H100,
    )
    assert step.seconds == step.compute_seconds == pytest.approx(2e12 / 989e12)


@pytest.mark.parametrize(
    ("tokens", "share"), [(1, 0.0625), (16, 0.643926), (64, 0.983925), (256, 1.0)]
)
def test_share_of_experts(tokens: int, share: float) -> None:
    found = expert_share(experts=128, per_token=8, tokens=tokens)
    assert found == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "reduce", "gather", "broadcast"),
    [(8, 450e9, 0.062222, 0.031111, 0.035556), (64, 50e9, 0.63, 0.315, 0.32)],
)
def test_collectives(
    ranks: int, bandwidth: float, reduce: float, gather: float, broadcast: float
) -> None:
    """16 GB over NVLink and InfiniBand, as nccl-tests defines bus bandwidth."""
    link = {"bytes_per_second": bandwidth}
    for operation, seconds in ((all_reduce_seconds, reduce), (all_gather_seconds, gather)):
        found = operation(16e9, ranks=ranks, latency=0, **link)
        assert found == pytest.approx(seconds, abs=1e-6)
    assert broadcast_seconds(16e9, **link) == pytest.approx(broadcast, abs=1e-6)


def test_latency_counts_once_per_message() -> None:
    assert all_reduce_seconds(0, ranks=8, bytes_per_second=1e9, latency=1e-5) == pytest.approx(
        14e-5
    )
