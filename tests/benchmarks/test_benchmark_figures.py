"""Formulas that the published benchmark figures use: FLOPs, bytes, and paired statistics."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def qwen() -> ModuleType:
    return importlib.import_module("tiny_qwen")


@pytest.fixture(scope="module")
def job() -> ModuleType:
    return importlib.import_module("engine_job")


@pytest.fixture(scope="module")
def folder(qwen: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    qwen.make_model(
        qwen.Shape(
            vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
        ),
        path,
        10.0,
    )
    return path


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = BENCHMARKS / "algorithms" / "report.py"
    spec = importlib.util.spec_from_file_location("algorithms_report", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flops_of_a_forward_are_those_that_torch_counts(qwen: ModuleType, folder: Path) -> None:
    """torch counts the full square of attention, the formula its causal half."""
    shape = qwen.Shape(
        vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    n = 21
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None])
    unseen = 4 * shape.layers * shape.heads * shape.head_dim * (n * n - n * (n + 1) // 2)
    assert qwen.forward_flops(shape, 0, n, n) + unseen == counter.get_total_flops()
    assert qwen.forward_flops(shape, 0, 9, 2) + qwen.forward_flops(
        shape, 9, n, 3
    ) == qwen.forward_flops(shape, 0, n, 5)


@pytest.mark.parametrize("name", ["uniform", "long-tail", "shared-prefix", "multi-turn"])
def test_needed_flops_are_those_of_every_text_once(
    job: ModuleType, qwen: ModuleType, name: str
) -> None:
    """The slow version: every distinct beginning of a text that is fed forward costs its last
    token, and those that predict cost the head.
    """
    profile = replace(
        job.PROFILES[name],
        prompt=5,
        completion=7,
        mean=4 if job.PROFILES[name].mean else 0,
        shared=9 * bool(job.PROFILES[name].shared),
    )
    work = job.make_work(profile, 3, vocabulary=10**6)
    shape, rng = qwen.Shape(vocabulary=1360), random.Random(1)
    fed: set[tuple[int, ...]] = set()
    predictions: set[tuple[int, ...]] = set()
    drawn = 0
    for conversation in work:
        history: list[int] = []
        for turn, lengths in zip(conversation.turns, conversation.lengths, strict=True):
            prompt = history + turn
            for length in lengths:
                text = prompt + rng.choices(range(10**6), k=length)
                fed |= {tuple(text[:i]) for i in range(1, len(text))}
                predictions |= {tuple(text[:i]) for i in range(len(prompt), len(text))}
                drawn += length
                history = text
    slow = sum(
        qwen.forward_flops(shape, len(text) - 1, len(text), predictions=text in predictions)
        for text in fed
    )
    assert job.needed_flops(shape, work, profile.shared) == slow
    assert drawn == sum(n for c in work for lengths in c.lengths for n in lengths)


def test_decode_moves_every_weight_once_and_each_cache() -> None:
    """Against the model: all its matrices (the tied embedding is the head), without biases and
    norms, and the keys and values of every cached token.
    """
    shapes = importlib.import_module("shapes")
    shape = shapes.SHAPES["tiny"]
    model = shapes.make_model("tiny", torch.device("cpu"), torch.float32)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cached = 2 * sum(2 * layer.self_attn.k_proj.out_features for layer in model.model.layers)
    assert shapes.decode_bytes(shape, [], 2) == 2 * matrices
    assert shapes.decode_bytes(shape, [3, 4], 2) - 2 * matrices == 7 * cached


def run(*heldout: tuple[int, float], **columns: Any) -> dict[str, Any]:
    return {"heldout": list(heldout), **columns}


def test_samples_to_a_target_are_read_off_a_straight_line(report: ModuleType) -> None:
    curve = run((0, 0.2), (100, 0.6), (200, 0.5), (300, 0.9))
    assert report.samples_to(curve, 0.4) == pytest.approx(50)
    assert report.samples_to(curve, 0.7) == pytest.approx(250)
    assert report.samples_to(curve, 0.95) is None
    assert report.samples_to(run((0, 0.8), (100, 0.9)), 0.7) == pytest.approx(0)
    assert report.gain(curve) == pytest.approx(0.7)


def test_a_paired_difference_takes_the_seeds_apart(report: ModuleType) -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 4.303 at 2 degrees of freedom.
    Seed 9 has no partner.
    """
    a = {1: run(x=10), 2: run(x=200), 3: run(x=3000), 9: run(x=5)}
    b = {1: run(x=9), 2: run(x=198), 3: run(x=2997)}
    found = report.paired(a, b, lambda r: r["x"])
    assert found == pytest.approx((2, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)), rel=1e-3)


def test_a_ratio_is_a_geometric_mean(report: ModuleType) -> None:
    """Ratios 2 and 8: geometric mean 4, factor exp(12.706 * log(2)) either way (t at 1 degree of
    freedom, standard error log 2).
    """
    a = {1: run(x=20), 2: run(x=80), 3: run(x=7)}
    b = {1: run(x=10), 2: run(x=10)}
    mean, low, high = report.ratio(a, b, lambda r: r["x"])
    assert (mean, math.log(high / 4), math.log(4 / low)) == pytest.approx(
        (4, 12.706 * math.log(2), 12.706 * math.log(2)), rel=1e-3
    )
    assert report.ratio({1: run(x=3)}, b, lambda r: r["x"])[1:] == (0.0, math.inf)
