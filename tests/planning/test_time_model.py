"""Time and memory of phases against numbers computed by hand, with all fitted shares set to 1."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from sixfold_planning.architectures import Architecture, find
from sixfold_planning.constants import CONSTANTS, Constants
from sixfold_planning.decode_time import (
    Lengths,
    Sampler,
    decay_rate,
    draining_seconds,
    share_longer,
    steady_seconds,
    step_seconds,
)
from sixfold_planning.hardware import find_accelerator
from sixfold_planning.published import training_gib
from sixfold_planning.rl_time import sync_seconds
from sixfold_planning.train_time import (
    Engine,
    Layout,
    Pass,
    compute_seconds,
    pass_seconds,
    training_pass,
)

H100 = find_accelerator("H100")
ONE = Layout(1, 1, 1, 1)
IDEAL = Constants(
    tuned=1.0,
    eager=1.0,
    fp8=1.0,
    ring=1.0,
    bandwidth=1.0,
    decode_layer_s=0.0,
    layer_pass_s=0.0,
    expert_loop_s=0.0,
    switch_s=0.0,
    rl_micro_step_s=0.0,
    publish_gb_s=1e9,
    sync=1.0,
)
COMPILED = Engine(compiled=True, gathers=False)


def model(name: str) -> Architecture:
    found = find(name)
    assert found is not None
    return found


def test_there_are_at_most_twelve_constants() -> None:
    assert len(fields(CONSTANTS)) <= 12
    shares = ("tuned", "eager", "fp8", "ring", "bandwidth", "sync")
    assert all(0 < getattr(CONSTANTS, name) < 1 for name in shares)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 4.87), (32, 7.36), (256, 25.3)])
def test_a_decoding_step_of_llama_3_8b_on_an_h100(batch: int, milliseconds: float) -> None:
    arch = model("Llama-3-8B")
    step = step_seconds(arch, Sampler(H100, 1, 1, 2.0), batch, 2048, IDEAL)
    # The published figure reads the input embedding too; the model reads one row per token.
    embedding = 2 * 128256 * 4096 / 3.35e12
    assert 1000 * (step + embedding) == pytest.approx(milliseconds, rel=0.003)


def test_training_flops_at_the_peak() -> None:
    arch = model("Llama-3-8B")
    seconds = compute_seconds(arch, H100, 1e6, 4096, Pass(3, 3, True), COMPILED, IDEAL)
    assert seconds == pytest.approx(48.25e9 * 1e6 / 989.4e12, rel=0.002)


def test_fp8_doubles_the_products_and_not_the_attention() -> None:
    arch = model("Llama-3-8B")
    products = Pass(1, 0, False)
    attention = Pass(0, 1, False)
    fp8 = replace(COMPILED, dtype="fp8")

    def seconds(work: Pass, engine: Engine) -> float:
        return compute_seconds(arch, H100, 1e6, 4096, work, engine, IDEAL)

    assert seconds(products, COMPILED) == pytest.approx(2 * seconds(products, fp8), rel=1e-3)
    assert seconds(attention, COMPILED) == seconds(attention, fp8)


def test_the_bubble_of_a_pipeline() -> None:
    arch = model("Llama-3-8B")
    work = training_pass("none", adapters=False)

    def seconds(stages: int, engine: Engine) -> float:
        layout = Layout(stages, 1, 1, stages)
        return pass_seconds(arch, H100, layout, 4096, 8, 4096, work, engine, IDEAL)

    whole = seconds(1, COMPILED)
    assert seconds(4, COMPILED) == pytest.approx(whole / 4 * (1 + 3 / 8))
    chunks = replace(COMPILED, interleaves=True)  # 8 layers per stage
    assert seconds(4, chunks) == pytest.approx(whole / 4 * (1 + 3 / (8 * 8)))


def test_sharded_weights_bound_a_small_batch() -> None:
    # Two bf16 gathers and an fp32 reduction of 8.03e9 weights over 16 devices in two nodes.
    arch = model("Llama-3-8B")
    work = training_pass("none", adapters=False)
    layout = Layout(16, 1, 1, 1)
    engine = replace(COMPILED, gathers=True)
    seconds = pass_seconds(arch, H100, layout, 64, 1, 64, work, engine, IDEAL)
    assert seconds == pytest.approx(8 * 8.03e9 * 15 / 16 / 50e9, rel=1e-3)


def test_tensor_parallel_communication_can_hide() -> None:
    arch = model("Llama-3-70B")
    work = Pass(1, 0, False)
    layout = Layout(8, 8, 1, 1)
    open_, hidden = COMPILED, replace(COMPILED, hides_tensor_parallel=True)

    def seconds(engine: Engine) -> float:
        return pass_seconds(arch, H100, layout, 8192, 1, 8192, work, engine, IDEAL)

    # 80 layers, 2 all-reduces of 8192 x 8192 bf16 values, 2 x 7/8 of the bytes at 450 GB/s.
    reduces = 80 * 2 * 2 * 8192 * 8192 * 2 * 7 / 8 / 450e9
    products = 2 * (70.554e9 - 128256 * 8192) * 8192 / 8 / 989.4e12
    assert seconds(open_) == pytest.approx(reduces + products, rel=1e-3)
    assert seconds(hidden) == pytest.approx(max(reduces, products), rel=1e-3)


@pytest.mark.parametrize("mean", [100.0, 400.0, 500.0, 800.0])
def test_lengths_have_the_given_mean(mean: float) -> None:
    rate = decay_rate(mean, 1000.0)
    # The mean is the integral of the share that is longer.
    steps = 2000
    total = sum(share_longer((i + 0.5) / steps, rate) for i in range(steps)) / steps
    assert 1000 * total == pytest.approx(mean, rel=1e-3)
    assert share_longer(0.0, rate) == pytest.approx(1)
    assert share_longer(1.0, rate) == pytest.approx(0, abs=1e-12)


def test_launching_kernels_bounds_a_drain() -> None:
    arch = model("Qwen3-0.6B")
    slow = replace(IDEAL, decode_layer_s=1.0)
    sampler = Sampler(H100, 1, 1, 2.0)
    lengths = Lengths(0, 10, 100)
    # 28 layers, one second each, until the longest of 100 tokens ends.
    assert draining_seconds(arch, sampler, 4, lengths, slow) == pytest.approx(2800)
    # Without a drain, 16 sequences run at once: 4 sequences of 10 tokens are 40 / 16 steps.
    assert steady_seconds(arch, sampler, 4, lengths, slow) == pytest.approx(28 * 40 / 16)


def test_a_full_kv_cache_makes_sequences_wait() -> None:
    arch = model("Llama-2-7B")
    small, large = Sampler(H100, 1, 1, 2.0), Sampler(H100, 16, 1, 2.0)
    lengths = Lengths(100, 4000, 8000)
    # 524,288 bytes per token: 512 sequences need 1.1 TB, and one H100 has room for 27.
    assert draining_seconds(arch, small, 512, lengths, IDEAL) > 10 * draining_seconds(
        arch, large, 512, lengths, IDEAL
    )


def test_a_sync_moves_the_weights_once_or_three_times() -> None:
    arch = model("Qwen2.5-7B")
    assert sync_seconds(arch, 50, pipelined=True, k=IDEAL) == pytest.approx(
        2 * 7.6156e9 / 50e9, rel=1e-3
    )
    assert sync_seconds(arch, 50, pipelined=False, k=IDEAL) == pytest.approx(
        6 * 7.6156e9 / 50e9, rel=1e-3
    )


def memory(name: str, tokens: float, recompute: str, **changes: bool) -> float:
    options = {"adapters": False, "offloaded": False, "chunked_head": True} | changes
    return training_gib(model(name), ONE, tokens, 1, recompute, **options)


def test_state_and_logits_of_a_trainer() -> None:
    assert memory("Llama-3-8B", 0, "full") == pytest.approx(16 * 8.03e9 / 2**30, rel=1e-3)
    assert memory("Llama-3-8B", 0, "full", adapters=True) == pytest.approx(4 * 8.03e9 / 2**30)
    tokens = 1e6
    whole = memory("Qwen3-4B", tokens, "full", chunked_head=False) - memory("Qwen3-4B", 0, "full")
    inputs = tokens * 2 * 2560 * 36
    assert whole == pytest.approx((inputs + tokens * 16 * 151936) / 2**30, rel=1e-6)


def test_offloading_saves_the_inputs_of_all_layers() -> None:
    saved = memory("Qwen3-4B", 65536, "full") - memory("Qwen3-4B", 65536, "full", offloaded=True)
    assert saved == pytest.approx(65536 * 2 * 2560 * 36 / 2**30)
