"""A run on several ranks gives the numbers of a run in one process, and its ranks end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sixfold import ranks
from sixfold.checkpoint.checkpoint import load_checkpoint
from sixfold.files.folder import RunFolder
from sixfold.rollout.driver import Driver
from sixfold.run.several_ranks import follower_folder, remove_followers
from tests.rank_runs import RankRun, train_on_ranks
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
    "ppo": {"algorithm__name": "ppo", "algorithm__beta": 0.0},
    "ppo, lora, head on the policy": {**LORA, "algorithm__name": "ppo", "critic__body": "policy"},
}


GROUPS: dict[str, dict[str, Any]] = {
    "fused reference, epochs": {"parallel__tensor": 2},
    "dapo": {"parallel__context": 2},
    "lora, reference with an adapter": {"parallel__context": 2},
    "ppo": {"parallel__context": 2},
}
"""Settings of the ranks alone."""


@pytest.mark.mostly_nightly(2)
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


@pytest.mark.mostly_nightly(1)
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


def test_stopped_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    run = started(tmp_path, parallel__timeout_s=3)
    os.kill(run.pids()[1], signal.SIGSTOP)
    try:
        assert run.code(0) == 3
    finally:
        os.kill(run.pids()[1], signal.SIGKILL)
    assert "rank 1 " in run.errors() and "parallel.timeout_s = 3" in run.errors()


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
