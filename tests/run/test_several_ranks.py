"""A run on several ranks gives the numbers of a run in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sixfold.checkpoint.checkpoint import load_checkpoint
from tests.rank_runs import train_on_ranks
from tests.run.processes import metrics, tiny_recipe

LAYOUT = {
    "rollout/dropped_tokens",
    "rollout/kv_peak_frac",
    "rollout/queue_peak",
    "rollout/reused_frac",
    "sync/broadcast_bytes",
    "sync/gather_bytes",
    "train/microbatches",
    "train/tokens",
}
"""Metrics that depend on time, or on the division of the work among ranks."""


def curve(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in LAYOUT} for line in metrics(run)]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-3) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == pytest.approx(b[key], rel=rel, abs=1e-5), (b["step"], key)


def trained(folder: Path, name: str, size: int, **settings: Any) -> Path:
    flags = tiny_recipe(folder, **{"run__steps": 3, **settings}, run__name=name)
    run = train_on_ranks(size, ["train", "demo", *flags], folder / f"{name}-errors")
    assert run.codes() == [0] * size, run.errors()
    return folder / name


LORA = {"model__lora__rank": 4, "model__lora__alpha": 8, "trainer__learning_rate": 1e-2}

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"eval__every": 2, "algorithm__beta": 0.1, "reference__reset_every": 2},
    "dapo": {"algorithm__name": "dapo"},
    "dynamic K": {"rollout__oversample": 6, "rollout__prompts_per_step": 3},
    "remax": {"algorithm__name": "remax"},
    "fused reference, epochs": {
        "algorithm__beta": 0.1,
        "reference__placement": "fused",
        "algorithm__epochs": 2,
        "algorithm__minibatches": 2,
        "model__scratch__kv_heads": 2,
    },
    "lora, reference with an adapter": {
        **LORA,
        "algorithm__beta": 0.1,
        "reference__reset_every": 2,
        "eval__every": 2,
    },
    "ppo": {"algorithm__name": "ppo", "algorithm__beta": 0.0, "model__scratch__kv_heads": 2},
    "ppo, lora, head on the policy": {**LORA, "algorithm__name": "ppo", "critic__body": "policy"},
}


GROUPS: dict[str, dict[str, Any]] = {
    "fused reference, epochs": {"parallel__tensor": 2},
    "dapo": {"parallel__context": 2},
    "lora, reference with an adapter": {"parallel__context": 2},
    "ppo": {"parallel__tensor": 2},
}
"""Settings of the ranks alone."""


@pytest.mark.nightly
@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_learn_as_one_process_does(name: str, tmp_path: Path) -> None:
    settings = METHODS[name]
    alone = trained(tmp_path, "alone", 1, **settings)
    together = trained(tmp_path, "ranks", 2, **settings, **GROUPS.get(name, {}))
    same(curve(together), curve(alone))
    assert not [p for p in tmp_path.iterdir() if p.name not in {"alone", "ranks"} and p.is_dir()]


def weights(run: Path, step: int) -> dict[str, Any]:
    checkpoint = load_checkpoint(run / "checkpoints" / f"step-{step:06d}")
    found = {f"trainer/{name}": tensor for name, tensor in checkpoint.payload.tensors.items()}
    for file in checkpoint.model_path.glob("*.safetensors"):
        found |= load_file(file)
    return found


SAVED: dict[str, dict[str, Any]] = {
    "weights": {"algorithm__beta": 0.1},
    "adapter, critic": {**LORA, "algorithm__name": "ppo"},
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
def test_checkpoint_of_two_ranks_resumes_on_one_and_on_four(saved: str, tmp_path: Path) -> None:
    settings = {"rollout__prompts_per_step": 5, **SAVED[saved]}
    flags = tiny_recipe(tmp_path, run__name="run", run__steps=2, **settings)
    first = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
    assert first.codes() == [0, 0], first.errors()
    found = {}
    for size in (2, 1, 4):
        resumed = tmp_path / f"of-{size}"
        shutil.copytree(tmp_path / "run", resumed)
        more = ["train", "--resume", str(resumed), "--run.steps", "3"]
        run = train_on_ranks(size, more, tmp_path / f"errors-{size}")
        assert run.codes() == [0] * size, run.errors()
        found[size] = (curve(resumed), weights(resumed, 3))
    for size in (1, 4):
        same(found[size][0], found[2][0])
        for name, tensor in found[2][1].items():
            assert (found[size][1][name] - tensor).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("sync.kind", "copy", "shared"),
        ("parallel.replicas", "3", "divisor"),
        ("parallel.tensor", "2", "value that does is 1"),  # one key-value head
        ("parallel.context", "3", "value that does is 2"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused_once(
    setting: str, value: str, remedy: str, tmp_path: Path
) -> None:
    flags = [*tiny_recipe(tmp_path, run__name="run"), f"--{setting}", value]
    run = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
    assert 2 in run.codes() and 0 not in run.codes()
    assert run.errors().count("error:") == 1
    assert setting in run.errors() and remedy in run.errors()
    assert not (tmp_path / "run").exists()
