"""Kills at every point of a save of two ranks (F01 to F05), and saves that fail on one rank alone.

The ranks are threads that share one disk. A kill ends both, as the end of a job does. What it would
leave is copied, so nobody has to die.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sixfold.checkpoint import parts, saver
from sixfold.checkpoint.best import BestSteps
from sixfold.checkpoint.checkpoint import load_checkpoint
from sixfold.checkpoint.listing import list_checkpoints, newest_checkpoint
from sixfold.checkpoint.publication import clean
from sixfold.checkpoint.saver import Saver
from sixfold.errors import UserError
from sixfold.files import durable
from sixfold.ranks import OtherRankFailed, Ranks
from sixfold.recipe.schema import CheckpointConfig
from tests.thread_ranks import on_threads, rank_here

from .test_checkpoint import names


class Model:
    """Weights of a policy that only a saver sees."""

    lora = None

    def __init__(self, step: int) -> None:
        self.layer = torch.full((8,), float(step))
        self.head = torch.full((6,), float(step))

    def weights(self) -> dict[str, torch.Tensor]:
        return {"layer": self.layer, "head": self.head}

    def save(self, folder: Path, weights: Any) -> None:
        (folder / "config.json").write_text("{}")

    @property
    def model(self) -> Model:
        return self

    def named_parameters(self, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
        return list(self.weights().items())


class Moments:
    """A component with tensors."""

    def __init__(self, step: int) -> None:
        self.step = step

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.full((5,), float(self.step)) for name in ("a", "b")}

    def state(self) -> dict[str, Any]:
        return {"step": self.step}

    def load(self, tensors: Any, state: Any) -> None: ...


class Saving:
    """The saver of one rank, and its warnings."""

    def __init__(self, ranks: Ranks, folder: Path, *, background: bool = False) -> None:
        settings = CheckpointConfig(keep=1, asynchronous=background)
        self.warnings: list[str] = []
        self._saver = Saver(folder, ranks, settings, {}, BestSteps(0), self.warnings.append)

    def save(self, step: int, *, required: bool = True) -> None:
        policy: Any = Model(step)
        registry = {"policy": Moments(step)}
        states = {"policy": {"step": step}, "progress": {"step": step}}
        self._saver.save("step", policy, registry, states, required=required)


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", rank_here)
    monkeypatch.setattr(parts, "revert_weight_conversion", lambda model, weights: weights)


def save_on_two(folder: Path, step: int) -> list[Any]:
    return on_threads(2, lambda ranks: Saving(ranks, folder).save(step))


def assert_is(path: Path, step: int) -> None:
    """Every tensor of the checkpoint is of this step."""
    found = load_checkpoint(path)
    assert found.step == step and found.payload.components["policy"] == {"step": step}
    weights = [load_file(file) for file in path.glob("model/*.safetensors")]
    every = [*found.payload.tensors.items(), *(item for part in weights for item in part.items())]
    assert sorted(name for name, _ in every) == ["head", "layer", "policy/a", "policy/b"]
    assert all((tensor == step).all() for _, tensor in every)


class Kills:
    """Copies of a folder at each fault point: what a kill at this point would leave."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._lock = threading.Lock()
        self.found: list[Path] = []

    def __next__(self) -> int:
        with self._lock:
            self.found.append(self._copies / f"{len(self.found)}")
            shutil.copytree(self._folder, self.found[-1], copy_function=_copy_if_there)
        return 0


def _copy_if_there(source: str, target: str) -> None:
    with suppress(FileNotFoundError):  # another thread has just renamed it
        shutil.copyfile(source, target)


def test_a_kill_at_every_point_of_a_save_of_two_ranks_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint is kept, so the points between its publication and the deletion count too."""
    folder = tmp_path / "run"
    assert save_on_two(folder, 8) == [None, None]
    kills = Kills(folder, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_arrivals", kills)
        patch.setenv("SIXFOLD_FAULT", ":-1")
        assert save_on_two(folder, 9) == [None, None]
    seen = {8: 0, 9: 0}
    for number, left in enumerate(kills.found):
        newest, warnings = newest_checkpoint(left)
        assert newest is not None and warnings == []
        step = int(newest.name.removeprefix("step-"))
        assert_is(newest, step)
        seen[step] += 1
        if step == 8 and number % 4 == 1:  # the resumed run makes the same checkpoint again
            assert save_on_two(left, 9) == [None, None]
            assert names(left) == ["step-000009"]
            assert_is(left / "step-000009", 9)
        else:
            clean(left)
            assert all(name.startswith("step-") for name in names(left)), "leftovers are removed"
    assert seen[8] >= 15 and seen[9] >= 3, seen


def _refused(
    monkeypatch: pytest.MonkeyPatch, rank: int, steps: Collection[int], error: Exception
) -> None:
    """Make the saves of these steps fail on one rank."""
    write = parts.Parts._write

    def broken(self: parts.Parts, kind: str, tensors: Any) -> None:
        if self._ranks.rank == rank and int(self._path.name[5:]) in steps:
            raise error
        write(self, kind, tensors)

    monkeypatch.setattr(parts.Parts, "_write", broken)


FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_refuses_one_rank_is_a_warning_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, background: bool
) -> None:
    """The ranks count alike: two failures, a success and two more failures end no run."""
    _refused(monkeypatch, rank, (1, 2, 4, 5), FULL_DISK)

    def work(ranks: Ranks) -> list[str]:
        saving = Saving(ranks, tmp_path, background=background)
        for step in range(1, 7):
            saving.save(step, required=False)
        saving.save(7)
        return saving.warnings

    found = on_threads(2, work)
    assert [len(warnings) for warnings in found] == [4, 4], found
    assert all("no space left" in line for line in found[rank]), found
    assert names(tmp_path) == ["step-000007"]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_stays_full_for_one_rank_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    _refused(monkeypatch, 1, range(1, 99), FULL_DISK)

    def work(ranks: Ranks) -> tuple[int, str, bool]:
        saving = Saving(ranks, tmp_path, background=background)
        step = 0
        while True:
            step += 1
            try:
                saving.save(step, required=False)
            except UserError as error:
                return step, str(error), ranks.agreed_on(error)

    for step, said, agreed in on_threads(2, work):
        assert step == saver.FAILURES + background and "no space left" in said and agreed
    assert list_checkpoints(tmp_path) == []


def test_a_bug_while_one_rank_saves_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no refusal of the disk, so no rank goes on with a warning."""
    _refused(monkeypatch, 1, [1], ValueError("a bug"))
    first, second = on_threads(2, lambda ranks: Saving(ranks, tmp_path).save(1, required=False))
    assert isinstance(second, ValueError)
    assert isinstance(first, OtherRankFailed) and "rank 1 failed: ValueError: a bug" in str(first)
    assert list_checkpoints(tmp_path) == []
