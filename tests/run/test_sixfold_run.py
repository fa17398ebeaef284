"""A run that samples from `sixfold serve`: the same weights and metrics as in one process, bit for
bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run
from sixfold.types import Task
from tests.server.serving import Running, running

from .processes import metrics, tiny_recipe

SETTINGS: dict[str, Any] = dict(
    run__steps=3, rollout__temperature=0.9, rollout__top_k=20, checkpoint__every=3,
    # With heads of 8, the last bit of a log-prob depends on the number of rows of a step.
    model__scratch__head_dim=16,
)  # fmt: skip


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in."""
    return len(completion) / 12


def run(folder: Path, name: str, **more: Any) -> Path:
    flags = tiny_recipe(folder, **{**SETTINGS, **more})
    recipe = parse_recipe(f"run.name = '{name}'", "test", flags)
    assert train_run(recipe, resume=None, reward=length) == 0
    return folder / name


def weights(folder: Path) -> str:
    (file,) = folder.glob("checkpoints/step-000003/model/model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the same architecture, with other weights."""
    flags = tiny_recipe(tmp_path_factory.mktemp("server"), **SETTINGS)
    model = parse_recipe("run.name = 'x'", "test", flags).model
    with running(load_policy(model, seed=99, device="cpu"), allow_weight_updates=True) as it:
        yield it


@pytest.mark.slow
def test_another_process_computes_what_one_process_does(tmp_path: Path, server: Running) -> None:
    """A Sixfold server as the sampler gives the run of the embedded engine."""
    here = run(tmp_path, "here")
    there = run(
        tmp_path, "there", rollout__backend__kind="sixfold", rollout__backend__url=server.url
    )
    assert weights(here) == weights(there)
    kept = ("train/", "reward/", "rollout/length", "rollout/tokens", "rollout/kept_", "mismatch/")
    for mine, theirs in zip(metrics(here), metrics(there), strict=True):
        same = {key: value for key, value in mine.items() if key.startswith(kept)}
        assert same == {key: theirs[key] for key in same} and len(same) > 10
    server.idle()


def test_a_server_that_must_not_change_is_named(tmp_path: Path, server: Running) -> None:
    flags = tiny_recipe(tmp_path, **SETTINGS)
    model = parse_recipe("run.name = 'x'", "test", flags).model
    backend = dict(rollout__backend__kind="sixfold")
    with (
        running(load_policy(model, seed=99, device="cpu")) as fixed,
        pytest.raises(UserError, match="sixfold serve MODEL --allow-weight-updates"),
    ):
        run(tmp_path, "x", **backend, rollout__backend__url=fixed.url)
