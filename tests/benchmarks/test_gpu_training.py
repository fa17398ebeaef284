"""`benchmarks/gpu/train.py` runs on a CPU and writes its figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.nightly
def test_the_tiny_job_runs_on_a_cpu(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    importlib.import_module("train").main(["--device", "cpu", "--tiny", "--json", str(target)])
    found = json.loads(target.read_text())
    rows = [row for row in found["rows"] if row["side"] == "sixfold"]
    assert [row["checkpointing"] for row in rows] == ["none", "selective", "full"]
    assert all(row["tok_s"] > 0 and row["matmul_share"] > 0 and not row["oom"] for row in rows)


def test_needed_flops_are_those_of_forward_and_backward() -> None:
    """torch also counts masked attention scores, and the head of the last token."""
    shapes, job_module = (importlib.import_module(name) for name in ("shapes", "training_job"))
    shape = shapes.SHAPES["tiny"]
    job = job_module.make_job(
        shape.vocabulary, 1, 1, 1, 24, microbatch=99, checkpointing="none", steps=1, bfloat16=False
    )
    model = shapes.make_model("tiny", torch.device("cpu"), torch.float32)
    text = torch.tensor([job.prompts[0] + job.completions[0][0]])
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(text, use_cache=False).logits.sum().backward()
    n = text.shape[1]
    unseen = 4 * shape.layers * shape.heads * shape.head_dim * (n * n - n * (n + 1) // 2)
    head = 2 * shape.hidden * shape.vocabulary
    assert counter.get_total_flops() == job.needed_flops(shape) + 3 * (unseen + head)
