"""Samplers apart from the trainer: the same run where it must be the same, and nothing lost or
trained twice where it runs ahead.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.backends.samplers import Samplers
from sixfold.commands import train
from sixfold.controller.asynchronous import AsyncCollector
from sixfold.errors import UserError
from sixfold.model.empty import Architecture
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.generator import EngineLost
from sixfold.rollout.scheduled import ReplayDiverged
from sixfold.run.start import train_run
from sixfold.types import Task

from ..forked_programs import OF_A_RUN, fork_programs
from ..gate.gate import untimed
from .processes import metrics, tiny_recipe

SETTINGS: dict[str, Any] = dict(
    run__steps=4, checkpoint__every=2, sft__steps=2,
    # With heads of 8, the last bit of a log-prob depends on the number of rows of a step.
    model__scratch__head_dim=16,
)  # fmt: skip
PROCESSES: dict[str, Any] = dict(placement__kind="processes", placement__samplers=2)
AHEAD: dict[str, Any] = dict(rollout__staleness=2)


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in."""
    return len(completion) / 12


def run(folder: Path, name: str, resume: bool = False, **more: Any) -> Path:
    flags = tiny_recipe(folder, **{**SETTINGS, **more})
    recipe = parse_recipe(f"run.name = '{name}'", "test", flags)
    assert train_run(recipe, resume=folder / name if resume else None, reward=length) == 0
    return folder / name


def bits(folder: Path) -> dict[str, Any]:
    """What two equal runs share: the last weights, every trajectory, every metric of training."""
    newest = sorted(folder.glob("checkpoints/step-*"))[-1]
    kept = ("train/", "reward/", "mismatch/", "heldout/", "rollout/length")
    return {
        "weights": [file.read_bytes() for file in sorted(newest.glob("model/*.safetensors"))],
        "rollouts": [untimed(read_rollouts(file)) for file in sorted(folder.glob("rollouts/*"))],
        "metrics": [
            {key: value for key, value in line.items() if key.startswith(kept)}
            for line in untimed(metrics(folder))
        ],
    }


def trained(folder: Path) -> list[str]:
    """Task ids of the trained groups, in order."""
    files = sorted(folder.glob("rollouts/*"))
    return [row["task_id"] for file in files for row in read_rollouts(file) if row["sample"] == 0]


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch, targets=OF_A_RUN)
        yield


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one process, each after the one before."""
    return run(tmp_path_factory.mktemp("in-turn"), "here", run__steps=6)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with samplers in processes of their own."""
    return run(tmp_path_factory.mktemp("apart"), "whole", **PROCESSES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a run ahead. Copy it before changing it."""
    return run(tmp_path_factory.mktemp("recorded"), "ahead", **AHEAD)


KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": dict(algorithm__name="ppo"),
    "lora": dict(model__lora__rank=2),
    "oversample": dict(rollout__oversample=6),
    "truncated": dict(rollout__top_k=20, rollout__temperature=0.9, rollout__stop="['1']"),
    "several turns": dict(
        data__source="calculator",
        environment__episode="calculator",
        data__calculator__digits=2,
        model__scratch__context=96,
        rollout__max_turns=3,
        sft__steps=40,
    ),
}


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("kind", KINDS)
def test_processes_compute_what_one_process_does(tmp_path: Path, apart: Path, kind: str) -> None:
    """R-189: the same tokens, the same training, the same weights."""
    # A process has merged weights. So has the engine here with a copy of its own.
    merged: dict[str, Any] = dict(sync__kind="copy") if kind == "lora" else {}
    here = run(tmp_path, "here", **KINDS[kind], **merged)
    changes: dict[str, Any] = dict(placement__whole_every=3) if kind == "lora" else {}
    there = run(tmp_path, "there", **KINDS[kind], **changes, **PROCESSES) if KINDS[kind] else apart
    assert bits(there) == bits(here)


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("placement", ["local", "processes"])
def test_a_run_ahead_trains_every_group_once(tmp_path: Path, in_turn: Path, placement: str) -> None:
    """R-190: all groups of the task stream, none older than the bound, in any order of ending."""
    where = PROCESSES if placement == "processes" else {}
    ahead = run(tmp_path, "ahead", run__steps=6, **AHEAD, **where)
    assert sorted(trained(ahead)) == sorted(trained(in_turn))
    assert torch.get_num_threads() == 1
    lines = metrics(ahead)
    assert max(line["async/age_max"] for line in lines) <= 3
    assert lines[0]["async/age_max"] == 0


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("placement", ["local", "processes"])
def test_a_resumed_run_ahead_trains_every_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: Path, placement: str
) -> None:
    """Groups that were open at the end of the first process start again in the second."""
    settings = dict(run__steps=6, **AHEAD, **(PROCESSES if placement == "processes" else {}))
    collect, calls = AsyncCollector.collect, 0

    def stopping(self: AsyncCollector, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            assert len(self.ledger.admitted) == 12
            raise RuntimeError("stopped")
        return collect(self, *given)

    monkeypatch.setattr(AsyncCollector, "collect", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, "run", **settings)
    stopped = run(tmp_path, "run", resume=True, **settings)
    assert sorted(trained(stopped)) == sorted(trained(in_turn))
    assert [line["step"] for line in metrics(stopped)] == [1, 2, 3, 4, 5, 6]
    assert max(line["async/age_max"] for line in metrics(stopped)) <= 3


@pytest.mark.parametrize("settings", [{}, AHEAD])
def test_a_sampler_that_dies_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: Path, settings: dict[str, Any]
) -> None:
    """Its requests are sampled again, with the same tokens where all weights are current."""
    asked = 0
    generate = Samplers.generate

    async def killing(self: Samplers, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked in (40, 70):  # while others of the same step run
            os.kill(self.places[asked // 70].process.child.pid, signal.SIGKILL)
        return await generate(self, *given, **more)

    monkeypatch.setattr(Samplers, "generate", killing)
    struck = run(tmp_path, "struck", **settings, **PROCESSES)
    assert asked > 70
    assert sorted(trained(struck)) == sorted(trained(apart))
    if not settings:
        assert bits(struck) == bits(apart)


def test_a_sampler_that_keeps_dying_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Samplers.generate

    async def killing(self: Samplers, *given: Any, **more: Any) -> Any:
        os.kill(self.places[0].process.child.pid, signal.SIGKILL)
        return await generate(self, *given, **more)

    monkeypatch.setattr(Samplers, "generate", killing)
    more = dict(placement__samplers=1, placement__restarts=2)
    with pytest.raises(UserError, match=r"(?s)was killed by SIGKILL.*placement.restarts = 2"):
        run(tmp_path, "run", **{**PROCESSES, **more})


@pytest.mark.nightly
@pytest.mark.parametrize("update_kv", ["kept", "recomputed"])
@pytest.mark.parametrize("placement", ["local", "processes"])
def test_a_replayed_schedule_gives_the_same_bits(
    tmp_path: Path, placement: str, update_kv: str
) -> None:
    """Whatever the timing was: new weights reached sequences in flight, at any token."""
    where = PROCESSES if placement == "processes" else {}
    # Few sequences run at a time, so groups end one after another, while others have begun.
    more = dict(
        run__steps=4, rollout__max_new_tokens=50, rollout__window=1.0, checkpoint__every=4,
        engine__max_running=3, trainer__learning_rate=0.01, engine__update_kv=update_kv,
    )  # fmt: skip
    flags = tiny_recipe(tmp_path, **{**SETTINGS, **more, **AHEAD, **where})
    recipe = parse_recipe("run.name = 'ahead'", "test", flags)
    assert train_run(recipe, reward=length) == 0
    ahead = tmp_path / "ahead"
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    again = recipe.with_settings({"run.name": "again", "engine.max_running": 64})
    assert train_run(again, reward=length, replayed=ahead / "schedule.jsonl") == 0
    assert bits(tmp_path / "again") == bits(ahead)
    assert (tmp_path / "again" / "schedule.jsonl").read_text() == (
        ahead / "schedule.jsonl"
    ).read_text()
    if update_kv == "recomputed":  # the setting has reached the samplers
        kept = again.with_settings({"run.name": "kept", "engine.update_kv": "kept"})
        with suppress(ReplayDiverged):
            train_run(kept, reward=length, replayed=ahead / "schedule.jsonl")
            assert bits(tmp_path / "kept") != bits(ahead)


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_replay_that_differs_ends_with_the_reason(
    tmp_path: Path, recorded: Path, change: str
) -> None:
    """It waits for no token that does not come."""
    ahead = shutil.copytree(recorded, tmp_path / "ahead")
    file = ahead / "schedule.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    runs = lines[1]["groups"][0]["versions"][0][1]
    runs[-1][1] += 1 if change == "longer" else -1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = tiny_recipe(tmp_path, **SETTINGS, **AHEAD)
    recipe = parse_recipe("run.name = 'again'", "test", flags)
    with pytest.raises(ReplayDiverged, match=r"task .*, sample 0, differs from the recorded run"):
        train_run(recipe, reward=length, replayed=file)


def test_a_run_ahead_is_evaluated_before_its_first_update(tmp_path: Path) -> None:
    """While only the critic learns, the weights keep version 0 and samples are in flight."""
    more: dict[str, Any] = dict(algorithm__name="ppo", critic__warmup_steps=3, eval__every=1)
    ahead = run(tmp_path, "ahead", **AHEAD, **more)
    assert [line["sync/version"] > 0 for line in metrics(ahead)] == [False] * 3 + [True]
    assert all("heldout/accuracy" in line for line in metrics(ahead))


def test_other_steps_are_refused_on_resume(tmp_path: Path, recorded: Path) -> None:
    shutil.copytree(recorded, tmp_path / "ahead")
    with pytest.raises(UserError, match=r"steps of 4 prompts.*steps of 3.*prompts_per_step"):
        run(tmp_path, "ahead", resume=True, **AHEAD, run__steps=8, rollout__prompts_per_step=3)


def test_threads_are_shared_only_while_a_run_is_ahead(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        run(tmp_path, "ahead", **AHEAD, run__threads=2, run__steps=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_process_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Architecture.of
    monkeypatch.setattr(
        Architecture, "of", lambda model: replace(of(model), parameters=["another"])
    )
    with pytest.raises(EngineLost, match=r"(?s)sampler 0 failed.*set placement.kind = 'local'"):
        run(tmp_path, "run", **PROCESSES)


def uneven(completion: str, task: Task) -> float:
    """Equal rewards for the samples of every other task."""
    return len(completion) / 12 if int(task.answer) % 2 else 1.0


def replayed(ahead: Path, reward: Any, **settings: Any) -> Path:
    flags = tiny_recipe(ahead.parent, **{**SETTINGS, **settings, "engine__max_running": 64})
    recipe = parse_recipe("run.name = 'again'", "test", flags)
    assert train_run(recipe, reward=reward, replayed=ahead / "schedule.jsonl") == 0
    return ahead.parent / "again"


def test_groups_with_equal_rewards_are_replaced_ahead(tmp_path: Path) -> None:
    """DAPO: as long as rounds are left, later groups are trained in their place."""
    more: dict[str, Any] = dict(
        algorithm__name="dapo", algorithm__minibatches=2, algorithm__dynamic_sampling=9,
        rollout__staleness=1, engine__max_running=6, trainer__learning_rate=0.01,
    )  # fmt: skip
    flags = tiny_recipe(tmp_path, **{**SETTINGS, **more})
    recipe = parse_recipe("run.name = 'ahead'", "test", flags)
    assert train_run(recipe, reward=uneven) == 0
    ahead = tmp_path / "ahead"
    lines, rows = metrics(ahead), [json.loads(line) for line in (ahead / "schedule.jsonl").open()]
    numbers = [group["number"] for row in rows for group in row["groups"]]
    assert len(set(numbers)) == len(numbers) == 16
    rewards: dict[tuple[Path, str], set[float]] = {}
    for file in ahead.glob("rollouts/*"):
        for row in read_rollouts(file):
            rewards.setdefault((file, row["task_id"]), set()).add(row["reward"]["value"])
    assert len(rewards) == 16 and all(len(values) > 1 for values in rewards.values())
    # Every number up to the last is trained, skipped, or still open.
    skipped = sum(round(4 / line["dynamic/kept_frac"]) - 4 for line in lines)
    assert skipped > 4 and 16 + skipped <= max(numbers) + 1 + 8
    assert all(line["dynamic/unfilled"] == 0 for line in lines)
    assert max(line["async/age_max"] for line in lines) <= 2
    assert bits(replayed(ahead, uneven, **more))["weights"] == bits(ahead)["weights"]


def test_dynamic_sampling_ahead_ends_with_its_rounds(tmp_path: Path) -> None:
    """If no group is left that has a signal, a step takes those that it has."""

    def same(completion: str, task: Task) -> float:
        return 1.0

    more: dict[str, Any] = dict(
        algorithm__name="dapo", algorithm__minibatches=2, algorithm__dynamic_sampling=2,
        rollout__staleness=1,
    )  # fmt: skip
    flags = tiny_recipe(tmp_path, **{**SETTINGS, **more})
    recipe = parse_recipe("run.name = 'ahead'", "test", flags)
    assert train_run(recipe, reward=same) == 0
    for line in metrics(tmp_path / "ahead"):
        assert line["dynamic/unfilled"] == 4 and line["dynamic/rounds"] <= 2
    again = replayed(tmp_path / "ahead", same, **more)
    assert sorted(trained(again)) == sorted(trained(tmp_path / "ahead"))


@pytest.mark.nightly
def test_greedy_baselines_are_sampled_ahead(tmp_path: Path) -> None:
    """ReMax: each group has one of its own, and a replay samples it from the same versions."""
    more: dict[str, Any] = dict(
        algorithm__name="remax", rollout__max_new_tokens=40, engine__max_running=3,
        trainer__learning_rate=0.01, **AHEAD,
    )  # fmt: skip
    flags = tiny_recipe(tmp_path, **{**SETTINGS, **more})
    recipe = parse_recipe("run.name = 'ahead'", "test", flags)
    assert train_run(recipe, reward=length) == 0
    ahead = tmp_path / "ahead"
    rows = [json.loads(line) for line in (ahead / "schedule.jsonl").open()]
    greedy = [dict(group["versions"])[-1] for row in rows for group in row["groups"]]
    assert len(greedy) == 16 and len({version for runs in greedy for version, _ in runs}) > 1
    tokens = [sum(count for runs in greedy[i : i + 4] for _, count in runs) for i in (0, 4, 8, 12)]
    assert [line["rollout/greedy_tokens"] for line in metrics(ahead)] == tokens
    again = replayed(ahead, length, **more)
    assert bits(again) == bits(ahead)
    assert (again / "schedule.jsonl").read_text() == (ahead / "schedule.jsonl").read_text()
    with pytest.raises(ReplayDiverged, match="sample -1, differs"):
        rows[-1]["groups"][0]["versions"][-1][1][-1][1] += 1
        wrong = "".join(json.dumps(row) + "\n" for row in rows)
        (again / "schedule.jsonl").write_text(wrong)
        shutil.rmtree(ahead)
        replayed(shutil.move(again, ahead), length, **more)


def test_a_replay_is_made_again_and_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user does: the name, the verdict, and what is refused."""
    monkeypatch.chdir(tmp_path)
    flags = tiny_recipe(Path("runs"), **SETTINGS, **AHEAD)
    train_run(parse_recipe("run.name = 'ahead'", "test", flags))
    assert train.run(["--replay-schedule", "runs/ahead"]) == 0
    assert "step-000004 has the weights of" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"is a replay of .*ahead.*not resumed"):
        train.run(["--resume", "runs/ahead-replay"])
    with pytest.raises(UserError, match="is the recorded run itself"):
        train.run(["--replay-schedule", "runs/ahead", "--run.name", "ahead"])
    with pytest.raises(UserError, match="leave out the recipe"):
        train.run(["demo", "--replay-schedule", "runs/ahead"])
    with pytest.raises(UserError, match=r"has rollout.oversample = 6.*cannot be replayed"):
        train.run(["--replay-schedule", "runs/ahead", "--rollout.oversample", "6"])
    Path("runs/ahead/schedule.jsonl").unlink()
    with pytest.raises(UserError, match=r"only a run with rollout.staleness > 0 records"):
        train.run(["--replay-schedule", "runs/ahead", "--run.name", "other"])
