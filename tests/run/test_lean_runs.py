"""Runs with settings that save memory train, and resume bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .processes import metrics, start, tiny_recipe

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "algorithm__beta": 0.1,
    "run__precision": "bfloat16",
    "sft__steps": 4,
    "data__heldout": 2,
    "trainer__weights": "bfloat16",
}
FORMS: dict[str, dict[str, Any]] = {
    "master": {"reference__placement": "worker", "trainer__activation_offload": True},
    "stochastic": {
        "trainer__rounding": "stochastic",
        "trainer__optimizer": "adamw8bit",
        "trainer__offload": "optimizer",
        "reference__offload": True,
        "sync__kind": "copy",
    },
}


def finish(folder: Path, name: str, form: str, steps: int, resume: bool = False) -> Path:
    settings = COMMON | FORMS[form]
    flags = tiny_recipe(folder, run__name=name, run__steps=steps, **settings)
    process = start(flags, folder / "errors", resume=folder / name if resume else None)
    process.join(180)
    assert process.exitcode == 0, (folder / "errors").read_text()
    return folder / name


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_is_the_whole_run(form: str, tmp_path: Path) -> None:
    whole = finish(tmp_path, "whole", form, 4)
    finish(tmp_path, "parts", form, 2)
    parts = finish(tmp_path, "parts", form, 4, resume=True)
    for file in ("model/model.safetensors", "trainer.safetensors"):
        one, two = (load_file(run / "checkpoints/step-000004" / file) for run in (whole, parts))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    model = load_file(whole / "checkpoints/step-000004/model/model.safetensors")
    assert {t.dtype for t in model.values() if t.dim() > 1} == {torch.bfloat16}
    lines = metrics(whole)
    assert lines and all(math.isfinite(line["train/grad_norm"]) for line in lines[-1:])
