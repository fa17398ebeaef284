"""`benchmarks/gpu/run.py` runs from end to end where there is no GPU, and counts bytes and FLOPs as
it says.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tape import TapeCapture

from sixfold.engine import cuda_graphs
from sixfold.engine.engine import Engine
from sixfold.kernels.cpu.engine_kernels import cpu_kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.syspath_prepend(str(BENCHMARKS / "gpu"))
        yield


def test_it_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure follows from its time, and no kernel beats its roofline by more than the limits'
    own error.
    """
    run, timing, shapes = (importlib.import_module(name) for name in ("run", "timing", "shapes"))
    limits = timing.Limits(
        bandwidth=1e12, matmul=1e14
    )  # far more than any CPU has: shares must come out below 1
    monkeypatch.setattr(run, "measure_limits", lambda clock, dtype: limits)
    run.main(
        [
            "--device",
            "cpu",
            "--shapes",
            "tiny",
            "--batches",
            "2,4",
            "--context",
            "40",
            "--steps",
            "3",
            "--json",
            str(tmp_path / "out.json"),
        ]
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["mode"], row["batch"], row["replayed_share"]) for row in found["decode"]] == [
        ("eager", 2, 0.0),
        ("eager", 4, 0.0),
    ]
    for row in found["decode"]:
        moved = shapes.decode_bytes(shapes.SHAPES["tiny"], [40 + 1 + 4 + 1] * row["batch"], 4)
        assert row["gb_s"] * row["step_ms"] == pytest.approx(moved / 1e6)
        assert row["bandwidth_share"] == pytest.approx(row["gb_s"] / 1e3)
    assert {row["kernel"] for row in found["kernels"]} >= {
        "attention, decode",
        "attention, prefill",
        "MLP",
        "sampling",
    }
    assert all(0 < row["roofline_share"] < 1 for row in found["kernels"])
    assert [(row["way"], row["tokens"]) for row in found["training attention"]] == [
        ("spans", 9 * 40),
        ("calls", 9 * 40),
    ]
    assert all(0 < row["matmul_share"] < 1 for row in found["training attention"])


def test_steps_with_cuda_graphs_are_measured_beside_those_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU by default. Here the tape stands for the capture; the timed steps are all replays,
    and attention alone is timed without graphs.
    """
    run, timing = (importlib.import_module(name) for name in ("run", "timing"))
    with pytest.raises(SystemExit):
        run.parse(["--device", "cpu", "--shapes", "tiny", "--modes", "graphs"])
    assert "graphs: not on cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = run.parse(["--shapes", "tiny", "--batches", "3", "--context", "40", "--steps", "3"])
    assert options.modes == ["eager", "graphs"]
    monkeypatch.undo()
    monkeypatch.setattr(cuda_graphs, "CUDACapture", TapeCapture)
    monkeypatch.setenv("SIXFOLD_KERNELS", "torch")
    cpu_kernels.cache_clear()
    found = run.measure_shape(
        "tiny",
        options,
        timing.Clock(torch.device("cpu")),
        timing.Limits(bandwidth=1e12, matmul=1e14),
    )
    kernel_speed = importlib.import_module("kernel_speed")
    engines: list[Engine] = []

    def on_a_gpu(*args: Any, **settings: Any) -> Engine:
        engines.append(Engine(*args, **settings, cuda_graphs=True))
        return engines[-1]

    monkeypatch.setattr(kernel_speed, "Engine", on_a_gpu)
    shape = importlib.import_module("shapes").SHAPES["tiny"]
    assert (
        len(
            kernel_speed.attention_rows(
                shape, 2, 40, timing.Clock(torch.device("cpu")), torch.float32
            )
        )
        == 2
    )
    assert engines[0].stats.graph_captures == 0 < engines[0].stats.eager_decodes
    cpu_kernels.cache_clear()
    assert [(row["mode"], row["replayed_share"]) for row in found["decode"]] == [
        ("eager", 0.0),
        ("graphs", 1.0),
    ]
    assert {row["mode"] for row in found["prefill"]} == {"eager", "graphs"} and len(
        found["kernels"]
    ) > 4


def test_decode_moves_every_weight_once_and_each_cache() -> None:
    """Against the model itself: all its matrices but biases and norms (the tied embedding is the
    head), and the cache that an engine fills.
    """
    shapes = importlib.import_module("shapes")
    shape, model = (
        shapes.SHAPES["tiny"],
        shapes.make_model("tiny", torch.device("cpu"), torch.float32),
    )
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cached = 2 * sum(2 * layer.self_attn.k_proj.out_features for layer in model.model.layers)
    assert shapes.decode_bytes(shape, [], 2) == 2 * matrices
    assert shapes.decode_bytes(shape, [3, 4], 2) - 2 * matrices == 7 * cached


def test_a_roofline_is_the_larger_bound() -> None:
    limits = importlib.import_module("timing").Limits(bandwidth=100.0, matmul=1000.0)
    assert limits.seconds(200.0, 1000.0) == 2.0
    assert limits.seconds(50.0, 3000.0) == 3.0
