"""Checkpoints that are written while training goes on: the same bytes, errors that surface, and
kills at every point.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sixfold.checkpoint import publication, saver
from sixfold.checkpoint.background import Background
from sixfold.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from sixfold.checkpoint.listing import list_checkpoints, newest_checkpoint
from sixfold.checkpoint.payload import Payload
from sixfold.checkpoint.publication import prune
from sixfold.checkpoint.snapshot import Snapshots
from sixfold.errors import NoAnswer, UserError
from sixfold.files.durable import faultpoint
from sixfold.processes.deadline import Deadline
from sixfold.report.notes import read_notes
from tests.run.processes import metrics, start, tiny_recipe
from tests.run.test_failed_steps import at_call, raises, train

from .test_checkpoint import killed_at, names

SETTINGS: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 99, "eval__every": 0}


def files(run: Path) -> dict[str, bytes]:
    """Contents of all files of all checkpoints, without values that depend on the clock."""
    clock = {"manifest.json", "state.json"}
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in (run / "checkpoints").rglob("*")
        if path.is_file() and path.name not in clock
    }


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("sync", ["shared", "copy"])
def test_checkpoints_are_the_same_as_without_a_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """This holds even if training changes all tensors before the first byte is written."""

    def late(*args: Any, **kwargs: Any) -> Path:
        time.sleep(0.2)
        return save_checkpoint(*args, **kwargs)

    monkeypatch.setattr(saver, "save_checkpoint", late)
    for name, background in (("a", False), ("b", True)):
        settings = {**SETTINGS, "checkpoint__asynchronous": background, "sync__kind": sync}
        assert train(tmp_path / name, **settings) == 0
    ours, theirs = files(tmp_path / "b" / "r"), files(tmp_path / "a" / "r")
    assert ours == theirs and len(list_checkpoints(tmp_path / "b/r/checkpoints")) == 4 + 6
    assert metrics(tmp_path / "a" / "r") == metrics(tmp_path / "b" / "r")
    for path in list_checkpoints(tmp_path / "b/r/checkpoints"):
        mine, other = (
            load_checkpoint(tmp_path / n / "r/checkpoints" / path.name).payload.components
            for n in "ba"
        )
        for components in (mine, other):
            components["progress"] = {**components["progress"], "seconds": 0, "unlogged": {}}
        assert mine == other


def test_a_snapshot_keeps_the_values_and_shared_memory() -> None:
    snapshots, weight = Snapshots(), torch.arange(12.0).reshape(3, 4)
    live = {"a": weight, "tied": weight, "part": weight[1], "turned": weight.T, "n": torch.ones(())}
    expected = {name: tensor.clone() for name, tensor in live.items()}
    first = snapshots.take(live)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    weight.zero_()
    assert all(torch.equal(first[name], expected[name]) for name in live)
    assert first["a"].data_ptr() == first["tied"].data_ptr()
    again = snapshots.take({**live, "n": torch.ones(2)})
    assert not again["a"].any() and again["n"].shape == (2,)
    del addresses["n"]
    assert all(again[name].data_ptr() == address for name, address in addresses.items())


class Training:
    """One thread changes the weights all the time while another thread saves them."""

    def __init__(self) -> None:
        self.weight = torch.zeros(64)
        self.background = Background(Deadline("the writer", 60))
        self.snapshots = Snapshots()

    def save(self, folder: Path, step: int) -> None:
        self.background.wait()
        self.weight.fill_(step)
        taken = self.snapshots.take({"w": self.weight})
        payload = Payload({"policy/w": taken["w"]}, {"progress": {"step": step}}, {})

        def write_model(path: Path) -> None:
            faultpoint("checkpoint.half a model")
            save_file(dict(taken), path / "model.safetensors")

        def write() -> None:
            save_checkpoint(folder, step, write_model=write_model, model_bytes=1, payload=payload)
            prune(folder, keep=1)

        self.background.start(write)

    def train(self) -> None:
        """Change the weights until the save has ended."""
        while True:
            self.weight += 1000
            thread = self.background._thread
            if thread is None or not thread.is_alive():
                return self.background.wait()


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_save_in_the_background_leaves_old_or_new(
    tmp_path: Path,
) -> None:
    seen = {8: 0, 9: 0}
    point, alive = 0, False
    while not alive:
        point += 1
        folder = tmp_path / f"kill-{point}"
        training = Training()
        training.save(folder, 8)
        training.background.wait()

        def action(folder: Path = folder) -> None:
            training = Training()
            training.save(folder, 9)
            training.train()

        alive = not killed_at(point, action)
        newest, warnings = newest_checkpoint(folder)
        assert newest is not None and warnings == []
        loaded = load_checkpoint(newest)
        assert loaded.payload.tensors["policy/w"].tolist() == [loaded.step] * 64
        seen[loaded.step] += 1
        training.save(folder, 10)
        training.background.wait()
        assert names(folder) == ["step-000010"]
    assert seen[8] >= 10 and seen[9] >= 5, seen


def test_an_error_of_a_job_is_raised_once_and_one_job_runs_at_a_time() -> None:
    background, running, most = Background(Deadline("the writer", 60)), [0], [0]

    def job() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1

    for _ in range(3):
        background.start(job)
    background.start(raises(ValueError("broken")))
    while threading.active_count() > 1 and "the writer" in {t.name for t in threading.enumerate()}:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="broken"):
        background.check()
    background.check()
    background.wait()
    assert most == [1]


def test_a_job_that_does_not_end_is_named_and_waited_for_once() -> None:
    release = threading.Event()
    background = Background(Deadline("the writer", 0.05, "Check the disk"))
    background.start(release.wait)
    background.check()
    began = time.monotonic()
    for action in (background.wait, lambda: background.start(release.wait), background.wait):
        with pytest.raises(NoAnswer, match=r"the writer .* 0\.05 s\. Check"):
            action()
    assert time.monotonic() - began < 1
    release.set()


@pytest.mark.slow
def test_an_error_of_the_writer_ends_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state at the failure is still saved."""
    settings = {**SETTINGS, "checkpoint__asynchronous": True, "sft__steps": 0}
    failing = at_call(
        monkeypatch, "sixfold.checkpoint.payload.Payload.write", 3, raises(ValueError("a bug"))
    )
    with failing, pytest.raises(ValueError, match="a bug"):
        train(tmp_path, **settings)
    done = len(metrics(tmp_path / "r"))
    assert done in (2, 3)
    assert names(tmp_path / "r/checkpoints")[-1] == f"step-{done:06d}"
    assert train(tmp_path, resume=True, **settings) == 0
    assert len(metrics(tmp_path / "r")) == 5


DISK = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", DISK)
def test_a_save_that_the_disk_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, background: bool
) -> None:
    settings = {**SETTINGS, "checkpoint__asynchronous": background, "sft__steps": 0}
    refused = raises(OSError(number, os.strerror(number)))
    with at_call(monkeypatch, "sixfold.checkpoint.payload.Payload.write", 3, refused):
        assert train(tmp_path, **settings) == 0
    saved = [path.name for path in list_checkpoints(tmp_path / "r" / "checkpoints")]
    assert saved == [f"step-{step:06d}" for step in (0, 1, 3, 4, 5)]
    assert names(tmp_path / "r/checkpoints") == saved, "no half directory"
    (note,) = [n for n in read_notes(tmp_path / "r/notes.jsonl") if "step-000002" in n.text]
    assert note.warning and "Training goes on without this checkpoint" in note.text
    assert [m.get("checkpoint/failed_total") for m in metrics(tmp_path / "r")][-1] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_stays_full_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    settings = {**SETTINGS, "checkpoint__asynchronous": background, "sft__steps": 0}
    asked, usage = [0], shutil.disk_usage

    def full(path: Any) -> Any:
        asked[0] += 1
        return usage(path)._replace(free=0) if asked[0] > 2 else usage(path)

    with monkeypatch.context() as patch:
        patch.setattr(publication.shutil, "disk_usage", full)
        with pytest.raises(UserError, match=r"checkpoint .* needs .* free some space"):
            train(tmp_path, **settings)
    assert names(tmp_path / "r/checkpoints") == ["step-000000", "step-000001"]
    assert saver.FAILURES <= len(metrics(tmp_path / "r")) <= saver.FAILURES + 2
    assert train(tmp_path, resume=True, **settings) == 0


@pytest.mark.slow
def test_signals_and_the_lock_wait_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a slow write, the run's lock is held and nothing else is saved."""
    from sixfold.files.folder import RunFolder

    log: list[str] = []
    write, unlock = Payload.write, RunFolder.unlock

    def slow(self: Payload, directory: Path) -> None:
        log.append(f"begin {directory.name}")
        time.sleep(0.3)
        write(self, directory)
        log.append(f"end {directory.name}")

    def logged(self: RunFolder) -> None:
        log.append("unlock")
        unlock(self)

    settings = {**SETTINGS, "checkpoint__asynchronous": True, "sft__steps": 0}
    monkeypatch.setattr(Payload, "write", slow)
    monkeypatch.setattr(RunFolder, "unlock", logged)
    interrupted: Callable[[], None] = raises(KeyboardInterrupt())
    with (
        at_call(monkeypatch, "sixfold.controller.loop.collate", 3, interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        train(tmp_path, **settings)
    assert log[-1] == "unlock" and log.count("unlock") == 1
    assert log[:-1] == [
        f"{what} .saving-step-{step:06d}" for step in range(3) for what in ("begin", "end")
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_saves_in_the_background_is_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    """The process is killed at a write of the thread. SIXFOLD_FAULT counts fault points."""
    settings = {"run__steps": 5, "sft__steps": 0, "checkpoint__every": 1}
    flags = {n: tiny_recipe(tmp_path, run__name=n, **settings) for n in ("whole", "killed")}
    process = start(flags["whole"], tmp_path / "errors")
    process.join(120)
    assert process.exitcode == 0
    background = [*flags["killed"], "--checkpoint.asynchronous", "true"]
    run = tmp_path / "killed"
    for point in (31, 50, 0):
        resume = run if (run / "recipe.toml").exists() else None
        fault = f"checkpoint:{point}" if point else ""
        process = start(background, tmp_path / "errors", resume, fault)
        process.join(120)
        assert process.exitcode == (137 if point else 0), (tmp_path / "errors").read_text()
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    ours, theirs = files(tmp_path / "killed"), files(tmp_path / "whole")
    for name, content in theirs.items():
        assert not name.endswith(".safetensors") or ours[name] == content
