"""Public architectures: KV bytes and FLOPs per token against numbers computed elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sixfold.errors import UserError
from sixfold_planning.architectures import (
    dense_of_size,
    find,
    mixture_of_size,
    size_in_name,
    with_sizes,
)


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("Meta-Llama-3-8B", 131_072),
        ("Qwen/Qwen2.5-7B-Instruct", 57_344),
        ("Qwen3-30B-A3B-Base", 98_304),
        ("DeepSeek-V3", 70_272),
    ],
)
def test_kv_bytes_per_token(model: str, kv: int) -> None:
    arch = find(model)
    assert arch is not None and arch.kv_bytes() == kv


@pytest.mark.parametrize(
    ("model", "gigaflops"),
    [
        ("Llama-3-8B", 48.25),
        ("Qwen2.5-7B", 44.89),
        ("Qwen3-30B-A3B", 23.08),
        ("DeepSeek-V3", 250.5),
    ],
)
def test_training_flops_per_token_at_4096(model: str, gigaflops: float) -> None:
    arch = find(model)
    assert arch is not None
    flops = 3 * (2 * arch.matmul_params + arch.attention_flops(4096))
    assert flops == pytest.approx(gigaflops * 1e9, rel=0.003)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("LLAMA3.1_8B", "Llama-3-8B"),
        ("Qwen3-30B3A", "Qwen3-30B-A3B"),
        ("Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B"),
        ("R1-Distill-Qwen-32B (code)", "Qwen2.5-32B"),
        ("Qwen2.5-Math-7B", "Qwen2.5-7B"),
        ("INTELLECT-3", "GLM-4.5-Air"),
        ("LLAMA3-405B", "Llama-3-405B"),
        ("LLaMA2-7B", "Llama-2-7B"),
        ("LLaMA-65B", "LLaMA-65B"),
    ],
)
def test_spellings_of_models(spelling: str, name: str) -> None:
    arch = find(spelling)
    assert arch is not None and arch.name == name


def test_an_unknown_model_is_not_guessed() -> None:
    assert find("Bailing-MoE v2.5") is None


@pytest.mark.parametrize(("batch", "share"), [(16, 0.644), (64, 0.984)])
def test_a_batch_reaches_a_share_of_the_experts(batch: int, share: float) -> None:
    # 128 experts, 8 per token: 1 - (1 - 8/128)^B.
    arch = find("Qwen3-30B-A3B")
    assert arch is not None
    rest = arch.read_params(1e9) - arch.expert_params
    assert (arch.read_params(batch) - rest) / arch.expert_params == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("size", [1.0, 7.0, 13.0, 70.0, 400.0])
def test_a_dense_model_of_a_size_has_about_that_many_weights(size: float) -> None:
    arch = dense_of_size(size)
    assert 12 * arch.layers * arch.hidden**2 == pytest.approx(size * 1e9, rel=0.15)


def test_the_publication_s_parameter_counts_replace_the_table_s() -> None:
    arch = find("Qwen3-30B-A3B")
    assert arch is not None
    changed = with_sizes(arch, 31.0, 3.0)
    assert (changed.params_b, changed.active_b, changed.layers) == (31.0, 3.0, 48)


@pytest.mark.parametrize(
    ("model", "layers", "hidden", "width", "experts", "chosen", "attention", "vocab"),
    [
        ("Qwen3-Coder-480B-A35B", 62, 6144, 2560, 160, 8, 128 * (2 * 96 + 2 * 8), 151936),
        ("Mixtral-8x22B-v0.1", 56, 6144, 16384, 8, 2, 128 * (2 * 48 + 2 * 8), 32768),
        ("openai/gpt-oss-120b", 36, 2880, 2880, 128, 4, 64 * (2 * 64 + 2 * 8), 201088),
        ("openai/gpt-oss-20b", 24, 2880, 2880, 32, 4, 64 * (2 * 64 + 2 * 8), 201088),
    ],
)
def test_parameters_of_mixtures_follow_from_their_config(
    model: str,
    layers: int,
    hidden: int,
    width: int,
    experts: int,
    chosen: int,
    attention: int,
    vocab: int,
) -> None:
    # Gated experts have three matrices; embedding and head are not tied.
    others = layers * hidden * attention + 2 * vocab * hidden
    expert = layers * 3 * hidden * width
    arch = find(model)
    assert arch is not None and (arch.experts, arch.experts_per_token) == (experts, chosen)
    assert arch.params_b * 1e9 == pytest.approx(others + experts * expert, rel=0.003)
    assert arch.active_b * 1e9 == pytest.approx(others + chosen * expert, rel=0.005)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Foo-27B", (27, 27)),
        ("foo 27b chat", (27, 27)),
        ("Foo-1.5-30B-A3B", (30, 3)),
        ("Foo-1T-A50B", (1000, 50)),
        ("Foo2-135M", (0.135, 0.135)),
        ("13B", (13, 13)),
        ("7B-70B Foo", None),
        ("Foo-8B/30B", None),
        ("Foo-8x3B", None),
        ("Foo-4", None),
        ("4bit Foo", None),
    ],
)
def test_a_size_in_a_name(name: str, sizes: tuple[float, float] | None) -> None:
    assert size_in_name(name) == (None if sizes is None else pytest.approx(sizes))


@pytest.mark.parametrize(
    ("total", "active", "layers", "widths"),
    [
        (30.5, 3.35, 48, 32 * (128 + 128)),  # Qwen3-30B-A3B
        (106.9, 12.2, 46, 96 * (128 + 128)),  # GLM-4.5-Air
        (671, 37.6, 61, 128 * (192 + 128)),  # DeepSeek-V3
    ],
)
def test_a_mixture_of_a_size_has_about_the_attention_of_public_ones(
    total: float, active: float, layers: int, widths: int
) -> None:
    arch = mixture_of_size(total, active)
    assert arch.attention_flops(1000) == pytest.approx(layers * widths * 1000, rel=0.30)
    # One sequence reads the active parameters, and a large batch reads all of them.
    table = arch.vocab * arch.hidden
    assert arch.read_params(1) == pytest.approx(active * 1e9 - table)
    assert arch.read_params(10_000) == pytest.approx(total * 1e9 - table)


def test_an_unknown_model_with_few_active_parameters_is_a_mixture() -> None:
    assert with_sizes(dense_of_size(16), 16, 2.2).experts > 0
    assert with_sizes(dense_of_size(16), 16, 16).experts == 0
    assert with_sizes(dense_of_size(16), 16, None).active_b == 16


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"params_b": 0.0}, "params_b = 0"),
        ({"active_b": float("nan")}, "active_b = nan"),
        ({"hidden": -1}, "hidden = -1"),
        ({"layers": 1.5}, "layers = 1.5"),
        ({"kv_heads": 0}, "kv_heads = 0"),
        ({"latent": 4}, "rotary = 0"),
        ({"attention_layers": -1}, "attention_layers = -1"),
        ({"experts": 4, "experts_per_token": 8}, "per_token / experts = 2"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, float], named: str) -> None:
    """Such as those of a damaged prediction.json."""
    arch = find("Llama-3-8B")
    assert arch is not None
    with pytest.raises(UserError, match=named):
        replace(arch, **sizes)  # type: ignore[arg-type]
