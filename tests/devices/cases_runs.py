"""Whole runs on a GPU: SFT, evaluation, RL, checkpoint and resume, for every way of syncing and
scoring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fused_kernels import register_gpu
from phantom import count_synchronisations, is_phantom
from tests.run.processes import metrics, tiny_recipe

import sixfold.run.assemble
from sixfold.checkpoint.registry import tensors_of
from sixfold.recipe.toml import parse_recipe
from sixfold.run.rl import RlStage
from sixfold.run.start import train_run

DEVICE = register_gpu()


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run, and the worker of a reference, takes the fake device."""
    monkeypatch.setattr(sixfold.run.assemble, "resolve_device", lambda *_: DEVICE.type)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "site"))  # for child processes
    monkeypatch.setattr(
        sixfold.run.assemble, "Environment", _InProcess(sixfold.run.assemble.Environment)
    )


class _InProcess:
    """The environment with one worker: each is a process that imports the fake device."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self._made(*args, **{**settings, "workers": 1})


def run(folder: Path, resume: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a tiny run."""
    small = dict(
        run__name="run",
        run__steps=2,
        sft__steps=1,
        eval__every=2,
        eval__tasks=2,
        data__heldout=2,
        environment__preflight=2,
        rollout__prompts_per_step=2,
        rollout__samples_per_prompt=3,
        rollout__max_new_tokens=6,
        checkpoint__every=1,
    )
    flags = tiny_recipe(folder, **{**small, **settings})
    assert (
        train_run(
            parse_recipe('run.name = "run"', "test", flags),
            resume=folder / "run" if resume else None,
        )
        == 0
    )
    return metrics(folder / "run")


def test_a_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With optimizer states and a reference on the device."""
    placed = []
    save = RlStage.save

    def noted(self: RlStage, *, required: bool) -> None:
        placed.append(self._roles)
        save(self, required=required)

    monkeypatch.setattr(RlStage, "save", noted)
    settings = dict(
        algorithm__beta=0.1,
        reference__placement="fused",
        trainer__activation_checkpointing="selective",
    )
    whole = run(tmp_path / "whole", **settings)
    tensors = tensors_of(placed[-1].components())
    assert all(is_phantom(t) for name, t in tensors.items() if t.dim()), [
        n for n, t in tensors.items() if not is_phantom(t)
    ]
    assert run(tmp_path / "cut", run__steps=1, **settings) == whole[:1]
    assert run(tmp_path / "cut", resume=True, **settings) == whole


RUNS: dict[str, dict[str, Any]] = {
    "copy, every second step, bfloat16": {
        "sync__kind": "copy",
        "sync__every": 2,
        "run__precision": "bfloat16",
    },
    "int8": {"sync__kind": "int8", "algorithm__correction": "truncated"},
    "ppo": {"algorithm__name": "ppo", "trainer__activation_checkpointing": "full"},
    "worker reference, reset": {
        "algorithm__beta": 0.1,
        "reference__placement": "worker",
        "reference__reset_every": 1,
    },
    "inline reference, minibatches, n-gram": {
        "algorithm__beta": 0.1,
        "algorithm__minibatches": 2,
        "engine__speculation__kind": "ngram",
        "trainer__share_prefix": False,
    },
    "truncated, oversampled": {
        "rollout__top_p": 0.9,
        "rollout__oversample": 4,
        "trainer__max_tokens_per_microbatch": 64,
    },
    "episodes, ppo": {
        "environment__episode": "calculator",
        "data__source": "calculator",
        "data__calculator__numbers": 2,
        "data__calculator__digits": 2,
        "data__limit": 100,
        "rollout__max_turns": 3,
        "algorithm__name": "ppo",
    },
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_runs(settings: dict[str, Any], tmp_path: Path) -> None:
    with count_synchronisations() as counts:
        made = run(tmp_path, **settings)
    assert len(made) == 2
    for line in made:
        assert line["train/skipped"] == 0.0 or line["train/tokens"] == 0.0
        assert line.get("mismatch/max_abs_logp", 0.0) < (
            0.5 if {"run__precision", "sync__kind"} & settings.keys() else 1e-4
        )
    assert counts.at("trainer/packing.py") == counts.at("trainer/segments.py") == 0, counts.table()


@pytest.mark.parametrize(
    "settings",
    [
        {"sync__kind": "shared", "run__precision": "bfloat16", "model__lora__base": "bfloat16"},
        {"sync__kind": "copy", "model__lora__dora": True},
    ],
)
def test_a_run_that_trains_an_adapter(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The reference runs on the shared base, and a resume is exact."""
    given = {"model__lora__rank": 2, "algorithm__beta": 0.1, **settings}
    whole = run(tmp_path / "a", **given)
    run(tmp_path / "b", run__steps=1, **given)
    assert run(tmp_path / "b", resume=True, **given) == whole
