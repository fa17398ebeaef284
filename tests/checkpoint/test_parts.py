"""Checkpoints that several ranks write: any number of ranks can load them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sixfold.checkpoint.checkpoint import load_checkpoint, load_newest
from sixfold.checkpoint.listing import list_checkpoints
from sixfold.commands.export import export
from sixfold.errors import UserError
from sixfold.ranks import ALONE
from tests.rank_processes import on_ranks

from .rank_saves import not_finite_somewhere, one_fails, one_group, resume_and_step, train_and_save


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_write_one_checkpoint(tmp_path: Path, tied: bool, background: bool) -> None:
    saved, _ = on_ranks(2, train_and_save, tmp_path / "run", tied, background)
    paths = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in paths] == ["step-000001", "step-000002"]
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == paths
    found = load_checkpoint(paths[-1])
    moments = {name: t for name, t in saved.items() if name.startswith("optimizer/")}
    ours = {n.removeprefix("policy/"): t for n, t in found.payload.tensors.items()}
    assert_equal(ours, moments)
    model = AutoModelForCausalLM.from_pretrained(found.model_path)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert_equal(weights, {name: t for name, t in saved.items() if name not in moments})
    parts = [f"-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    files = names(paths[-1])
    assert {f"{kind}{part}" for kind in ("trainer", "model/model") for part in parts} < {*files}
    sizes = [(paths[-1] / f"trainer{part}").stat().st_size for part in parts]
    assert min(sizes) > 0.5 * max(sizes), "both ranks write"
    weight_map = json.loads((found.model_path / "model.safetensors.index.json").read_text())
    assert {*weight_map["weight_map"].values()} <= {f"model{part}" for part in parts}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("two") / "run"
    on_ranks(2, train_and_save, folder)
    return folder


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train_and_save(ALONE, folder)
    return folder


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "size"), [(2, 1), (2, 4), (2, 2), (1, 2)])
def test_any_number_of_ranks_resumes(of_one: Path, of_two: Path, saved_by: int, size: int) -> None:
    """All ranks load the same tensors, and make the same next step as one process."""
    run = of_one if saved_by == 1 else of_two
    loaded, stepped = resume_and_step(ALONE, run)
    found: list[Any] = on_ranks(size, resume_and_step, run) if size > 1 else [(loaded, stepped)]
    checkpoint = load_newest(run / "checkpoints")[0]
    assert checkpoint is not None
    for before, after in found:
        saved = {n.removeprefix("policy/"): t for n, t in checkpoint.payload.tensors.items()}
        assert_equal({name: t for name, t in before.items() if name in saved}, saved)
        assert_equal(before, loaded)
        assert furthest(after, stepped) < 1e-6


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("kind", ["tensor", "context"])
def test_group_saves_whole_tensors_that_any_layout_resumes(tmp_path: Path, kind: str) -> None:
    """A checkpoint and a sync convert the layout of tensor groups exactly."""
    for saved, resumed, stepped, synced in on_ranks(2, one_group, tmp_path / "run", kind):
        assert_equal(resumed, saved)
        assert_equal(synced, {name: stepped[name] for name in synced})
        alone, after = resume_and_step(ALONE, tmp_path / "run")
        assert_equal(alone, saved)
        assert furthest(after, stepped) < 1e-6


@pytest.mark.slow
def test_one_and_two_ranks_save_the_same(of_one: Path, of_two: Path) -> None:
    one, two = (load_newest(run / "checkpoints")[0] for run in (of_one, of_two))
    assert one is not None and two is not None
    assert one.payload.components == two.payload.components
    assert furthest(dict(one.payload.tensors), dict(two.payload.tensors)) < 1e-6
    config = [(c.model_path / "config.json").read_text() for c in (one, two)]
    assert config[0] == config[1]


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["full disk", "too slow"])
def test_a_rank_that_cannot_write_leaves_the_previous_checkpoint(tmp_path: Path, how: str) -> None:
    found = on_ranks(2, one_fails, tmp_path / "run", how)
    expected = {
        "full disk": "rank 1: cannot save checkpoint .*no space left",
        "too slow": "rank 1 did not write its part within 0.5",
    }
    assert re.search(expected[how], found[0][0])
    for error, left in found:
        assert "step-000001" in error
        assert left == ["step-000000"], "no half directory"
    load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000000")


@pytest.mark.slow
def test_a_non_finite_value_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    found = on_ranks(2, not_finite_somewhere, tmp_path / "run")
    assert found == ["TrainingDiverged True"] * 2
    assert names(tmp_path / "run" / "checkpoints")[0].startswith("step-000000")
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty"])
def test_a_damaged_part_is_named_and_the_older_checkpoint_is_used(
    tmp_path: Path, of_two: Path, damage: str
) -> None:
    shutil.copytree(of_two, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-000002/trainer-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"truncated": content[:-9], "flipped": content, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"trainer-00002-of-00002\.safetensors"):
        load_checkpoint(file.parent)
    checkpoint, warnings = load_newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 1
    assert len(warnings) == 1 and file.name in warnings[0]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_exported_as_one_model(tmp_path: Path, of_two: Path) -> None:
    path = list_checkpoints(of_two / "checkpoints")[-1]
    assert export(str(path), tmp_path / "out", merge=False) == 0
    ours, theirs = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for folder in (tmp_path / "out", path / "model")
    )
    assert_equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+1=")
