"""Public architectures: KV bytes and FLOPs per token against numbers computed elsewhere."""

from __future__ import annotations

import pytest

from sixfold.planning.architectures import dense_of_size, find, with_sizes


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
