"""A run with the reference in each of its places: the same training and exact resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sixfold.report.rollouts import read_rollouts

from .processes import metrics, start, tiny_recipe

pytestmark = pytest.mark.slow

SETTINGS = {
    "algorithm__beta": 0.1,
    "reference__reset_every": 4,
    "sft__steps": 5,
    "data__heldout": 2,
}


def finish(folder: Path, name: str, placement: str, steps: int, resume: bool = False) -> Path:
    flags = tiny_recipe(
        folder, run__name=name, run__steps=steps, reference__placement=placement, **SETTINGS
    )
    process = start(flags, folder / "errors", resume=folder / name if resume else None)
    process.join(180)
    assert process.exitcode == 0, (folder / "errors").read_text()
    return folder / name


def weights(run: Path, file: str = "model/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-000006" / file)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps that were never stopped."""
    return finish(tmp_path_factory.mktemp("inline"), "whole", "inline", 6)


@pytest.mark.nightly
@pytest.mark.parametrize("placement", ["inline", "worker", "fused"])
def test_a_resumed_run_in_any_placement_is_the_inline_run(
    inline: Path, tmp_path: Path, placement: str
) -> None:
    """A stop in the middle, before and after the reset: weights, moments and the reference itself,
    bit for bit, and every metric.
    """
    finish(tmp_path, "run", placement, 3)
    run = finish(tmp_path, "run", placement, 6, resume=True)
    for file in ("model/model.safetensors", "trainer.safetensors"):
        ours, theirs = weights(run, file), weights(inline, file)
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in theirs
        ), file
    assert any(name.startswith("reference/") for name in weights(run, "trainer.safetensors"))
    assert metrics(run) == metrics(inline)
    for folder in (run, inline):
        records = read_rollouts(folder / "rollouts" / "step-000006.jsonl.zst")
        assert {record["reference_version"] for record in records} == {4}
        assert {(r["policy_version"], r["stale_by_versions"]) for r in records} == {(5, 0)}
    assert any(m.get("train/kl", 0.0) for m in metrics(run)), (
        "the policy never left the reference: nothing was compared"
    )


@pytest.mark.nightly
def test_a_checkpoint_of_one_placement_is_resumed_in_another(inline: Path, tmp_path: Path) -> None:
    finish(tmp_path, "run", "fused", 3)
    run = finish(tmp_path, "run", "inline", 6, resume=True)
    assert metrics(run) == metrics(inline)
