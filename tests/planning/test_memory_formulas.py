"""Memory of training state, activations, KV cache and logits: published numbers."""

from __future__ import annotations

import pytest

from sixfold_planning.memory import (
    STATES,
    activation_bytes,
    cache_bytes,
    cache_tokens,
    chunked_logits_bytes,
    devices_needed,
    group_tokens,
    inference_bytes,
    kv_bytes_per_token,
    latent_bytes_per_token,
    layer_activation_bytes,
    logits_bytes,
    sharded_bytes_per_parameter,
    training_bytes,
    whole_logits_peak,
)


@pytest.mark.parametrize(
    ("state", "total"),
    [("bfloat16", 18), ("bfloat16-gradients", 16), ("float32", 16), ("bfloat16-moments", 12)],
)
def test_bytes_per_parameter(state: str, total: int) -> None:
    """L22: 18, 16 and 12."""
    assert STATES[state].total == total


@pytest.mark.parametrize(("billions", "terabytes"), [(7, 0.126), (70, 1.26), (405, 7.29)])
def test_training_bytes(billions: int, terabytes: float) -> None:
    """L22 prints 126 GB, 1.26 TB and 7.3 TB."""
    assert training_bytes(billions * 1e9, STATES["bfloat16"]) == pytest.approx(terabytes * 1e12)


@pytest.mark.parametrize(("billions", "gpus"), [(70, 16), (405, 96)])
def test_gpus_for_the_training_state(billions: int, gpus: int) -> None:
    """L22: 16 and 96 H100, in nodes of 8."""
    total = training_bytes(billions * 1e9, STATES["bfloat16"])
    assert devices_needed(total, device_bytes=80e9, devices_per_node=8) == gpus


@pytest.mark.parametrize(("billions", "gigabytes"), [(7, 14), (70, 140), (405, 810)])
def test_inference_bytes(billions: int, gigabytes: int) -> None:
    assert inference_bytes(billions * 1e9, 2) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (18, 18, 18)), (1, (18, 7.5, 6.1875)), (2, (18, 4, 2.25)), (3, (18, 2.25, 0.28125))],
)
def test_sharded_bytes_per_parameter(stage: int, expected: tuple[float, ...]) -> None:
    """Megatron-LM: 6 + 12/d, 2 + 16/d, 18/d for d = 1, 8, 64."""
    state = STATES["bfloat16"]
    found = [sharded_bytes_per_parameter(state, stage=stage, ranks=d) for d in (1, 8, 64)]
    assert found == pytest.approx(expected)


def test_activation_bytes() -> None:
    """L22: 137.4 GB for 7B with 8,192 tokens and 4 sequences."""
    found = activation_bytes(layers=32, hidden=4096, length=8192, sequences=4, width=2)
    assert found / 1e9 == pytest.approx(137.44, abs=0.005)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "tensor", "gib"),
    [
        ("none", False, 1, 256.5),
        ("none", False, 8, 51.75),
        ("none", True, 1, 256.5),
        ("none", True, 8, 32.0625),
        ("selective", False, 1, 76.5),
        ("selective", False, 8, 29.25),
        ("selective", True, 8, 9.5625),
        ("full", False, 1, 4.5),
        ("full", True, 8, 4.5),
    ],
)
def test_layer_activations_of_gpt3(
    recompute: str, sequence_parallel: bool, tensor: int, gib: float
) -> None:
    """Korthikanti et al., Table 2, with 96 layers of GPT-3."""
    layer = layer_activation_bytes(
        length=2048,
        sequences=1,
        hidden=12288,
        heads=96,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    assert 96 * layer / 2**30 == pytest.approx(gib)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "expected"),
    [(32, 8, 131_072), (80, 8, 327_680), (28, 4, 57_344), (32, 32, 524_288)],
    ids=["llama-3-8b", "llama-3-70b", "qwen-2.5-7b", "llama-2-7b"],
)
def test_kv_bytes_per_token(layers: int, kv_heads: int, expected: int) -> None:
    """L20 and L22."""
    assert kv_bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=128, width=2) == expected


def test_latent_bytes_per_token_of_deepseek_v3() -> None:
    assert latent_bytes_per_token(layers=61, latent=512, rotary=64, width=2) == 70_272


def test_cache_of_256_long_sequences() -> None:
    """L20 and L22 with erratum E24: 687 GB, which is 640 GiB, not 670 GB."""
    found = cache_bytes(327_680, sequences=256, length=8192)
    assert found == 640 * 2**30
    assert found / 1e9 == pytest.approx(687, abs=0.5)


@pytest.mark.parametrize(
    ("sequences", "length", "per_token", "gib"),
    [(32, 2048, 131_072, 8), (32, 2048, 524_288, 32), (256, 2048, 131_072, 64)],
)
def test_cache_bytes(sequences: int, length: int, per_token: int, gib: int) -> None:
    """L20, oracle of the KV sizer."""
    assert cache_bytes(per_token, sequences=sequences, length=length) == gib * 2**30


def test_cache_tokens_fill_what_weights_leave() -> None:
    assert cache_tokens(device_bytes=80e9, used_bytes=14e9, per_token=131_072) == 503_540
    assert cache_tokens(device_bytes=80e9, used_bytes=140e9, per_token=327_680) == 0


def test_shared_prompt_saves_cache() -> None:
    """L20 and L21: 16 copies of a 1,000-token prompt become one."""
    sizes = {"prompt": 1000, "completion": 200, "samples": 16}
    assert group_tokens(**sizes, shared=False) == 19_200
    assert group_tokens(**sizes, shared=True) == 4_200


def test_logits_bytes() -> None:
    """L25: 32k tokens and 128k vocabulary: 8.4 GB, at least 30 GB at the peak."""
    sizes = {"tokens": 32_768, "vocabulary": 128_000, "width": 2}
    assert logits_bytes(**sizes) / 1e9 == pytest.approx(8.4, abs=0.05)
    peak = whole_logits_peak(**sizes)
    assert peak >= 30e9
    assert peak == 32_768 * 128_000 * (2 + 4 + 2)


def test_chunked_logits() -> None:
    """L25: 8 GB becomes 64 MB with 1k of the vocabulary at once, and 32 times less with 4k."""
    sizes = {"tokens": 32_768, "vocabulary": 131_072, "token_chunk": 32_768, "width": 2}
    assert chunked_logits_bytes(**sizes, vocabulary_chunk=1024) == 64 * 2**20
    small = chunked_logits_bytes(**sizes, vocabulary_chunk=4096)
    assert logits_bytes(tokens=32_768, vocabulary=131_072, width=2) == 32 * small


def test_a_chunk_larger_than_the_batch_is_the_whole_batch() -> None:
    found = chunked_logits_bytes(
        tokens=10, vocabulary=7, token_chunk=1024, vocabulary_chunk=1024, width=4
    )
    assert found == 10 * 7 * 4
