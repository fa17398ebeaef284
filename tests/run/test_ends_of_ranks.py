"""The ranks of a run end together: after a signal, an error, and when one is killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sixfold import ranks
from sixfold.checkpoint.checkpoint import load_checkpoint
from sixfold.files.folder import RunFolder
from sixfold.rollout.driver import Driver
from sixfold.run.several_ranks import follower_folder, remove_followers
from tests.rank_runs import RankRun, train_on_ranks
from tests.run.processes import metrics, tiny_recipe


def wait_less(rank: int) -> None:
    """A rank that was killed will not report, however long the others wait."""
    ranks.GRACE_S = 1.0


def started(folder: Path, **settings: Any) -> RankRun:
    """A long run on two ranks, when it has made two steps."""
    settings = {"run__steps": 10_000, "sft__steps": 1, "checkpoint__every": 5, **settings}
    flags = tiny_recipe(folder, run__name="run", **settings)
    run = train_on_ranks(2, ["train", "demo", *flags], folder / "errors", wait_less)
    until = time.monotonic() + 60
    while len(_lines(folder / "run" / "metrics.jsonl")) < 2:
        assert time.monotonic() < until and not run.ended(), run.errors()
        time.sleep(0.05)
    return run


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_stops_all_after_the_step(rank: int, tmp_path: Path) -> None:
    run = started(tmp_path)
    os.kill(run.pids()[rank], signal.SIGTERM)
    assert run.codes() == [143, 143], run.errors()
    last = json.loads(_lines(tmp_path / "run" / "metrics.jsonl")[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}" / "manifest.json").is_file()
    assert run.errors().count("go on with") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_others_and_is_named(rank: int, tmp_path: Path) -> None:
    run = started(tmp_path)
    os.kill(run.pids()[rank], signal.SIGKILL)
    codes = run.codes()
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 3
    assert run.errors().count("error:") == 1
    assert f"rank {rank} " in run.errors() and "did not answer" in run.errors()


def break_rollout(rank: int) -> None:
    """The rollout of step 3 fails on rank 1, as by a bug or a reply that never came."""
    calls, play = count(1), Driver.play

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise ConnectionError("the engine hung up")
        return play(*args, **kwargs)

    if rank == 1:
        Driver.play = broken  # type: ignore[method-assign]


def test_error_of_one_rank_saves_the_last_step(tmp_path: Path) -> None:
    settings = {"run__steps": 4, "sft__steps": 1, "data__heldout": 0, "checkpoint__every": 0}
    argv = ["train", "demo", *tiny_recipe(tmp_path, run__name="run", **settings)]
    run = train_on_ranks(2, argv, tmp_path / "errors", break_rollout)
    assert run.codes() == [1, 1], run.errors()
    assert run.errors().count("ConnectionError: the engine hung up") == 1, "one rank reports it"
    assert run.errors().count("The last good state is step-000002; go on with") == 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000002").step == 2


@pytest.mark.nightly
def test_stopped_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    run = started(tmp_path, parallel__timeout_s=3)
    os.kill(run.pids()[1], signal.SIGSTOP)
    try:
        assert run.code(0) == 3
    finally:
        os.kill(run.pids()[1], signal.SIGKILL)
    assert "rank 1 " in run.errors() and "parallel.timeout_s = 3" in run.errors()


def test_the_folder_of_a_killed_rank_is_deleted_by_the_next_start(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    run.metrics.write_text("{}")
    killed = follower_folder(tmp_path, 1)
    assert killed.__enter__().metrics.read_text() == "{}"
    remove_followers(tmp_path)
    with follower_folder(tmp_path, 1) as again:
        assert (again.checkpoints / "..").resolve() == tmp_path.resolve()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl"]
