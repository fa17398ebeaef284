"""Runs with a curriculum: resumed, ahead of the trainer, on several ranks, and refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold.commands import train
from sixfold.controller.loop import Controller
from sixfold.data.profile import Measurement, ProfileFile, ProfileKey, task_key
from sixfold.errors import UserError
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.curriculum import read_pass_rates
from sixfold.run.start import train_run
from sixfold.types import Task
from tests.rank_runs import train_on_ranks

from .processes import metrics, tiny_recipe

TASKS = [Task(f"task-{i}", f"{i % 10}+{i // 10}=", answer=i) for i in range(24)]
SETTINGS: dict[str, Any] = dict(
    run__steps=8, sft__steps=0, checkpoint__every=3, log__rollouts_every=1, eval__metric="reward",
    rollout__prompts_per_step=4, data__curriculum__every=2, data__curriculum__samples=2,
    data__curriculum__retest=4, data__curriculum__easy=0.9, data__curriculum__hard=0.1,
    model__scratch__head_dim=16,
)  # fmt: skip
AHEAD: dict[str, Any] = dict(rollout__staleness=1)
DYNAMIC: dict[str, Any] = dict(algorithm__dynamic_sampling=3)


def check(completion: str, task: Task) -> float:
    """A third of the tasks is always solved, a third never, a third by replies of even length."""
    kind = int(task.answer) % 3
    return float(kind == 0 or (kind == 1 and len(completion) % 2 == 0))


def run(
    folder: Path, name: str, tasks: Sequence[Task] = TASKS, resume: bool = False, **more: Any
) -> Path:
    flags = tiny_recipe(folder, **{**SETTINGS, **more})
    recipe = parse_recipe(f"run.name = '{name}'", "test", flags)
    again = folder / name if resume else None
    assert train_run(recipe, resume=again, reward=check, tasks=tasks) == 0
    return folder / name


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "curriculum.jsonl").read_text().splitlines()]


def trained(folder: Path) -> list[list[tuple[str, list[bool]]]]:
    """Tasks of each step, with what was solved of each."""
    steps = []
    for file in sorted(folder.glob("rollouts/*")):
        found: dict[str, list[bool]] = {}
        for row in read_rollouts(file):
            found.setdefault(row["task_id"], []).append(row["reward"]["solved"])
        steps.append(list(found.items()))
    return steps


def kind(name: str) -> int:
    return int(name.removeprefix("task-")) % 3


def test_tasks_that_are_always_or_never_solved_are_no_longer_drawn(tmp_path: Path) -> None:
    """The history is that of the rollouts, and the metrics are those of the history."""
    folder = run(tmp_path, "run", run__steps=16, data__curriculum__retest=0)
    steps, lines = trained(folder), metrics(folder)
    assert [line["step"] for line in history(folder)] == [2, 4, 6, 8, 10, 12, 14, 16]
    for line in history(folder):
        tally: dict[str, tuple[int, int]] = {}
        for name, solved in [
            pair for step in steps[line["step"] - 2 : line["step"]] for pair in step
        ]:
            before = tally.get(name, (0, 0))
            tally[name] = (before[0] + sum(solved), before[1] + len(solved))
        assert {name: tuple(seen) for name, seen in line["seen"].items()} == tally
        logged = lines[line["step"] - 1]
        for bucket, count in line["counts"].items():
            assert logged[f"data/{bucket}_frac"] == count / 24
        assert logged["data/moved"] == len(line["moved"])
        for name, _, bucket, _ in line["moved"]:
            assert bucket != "easy" or kind(name) < 2
            assert bucket != "hard" or kind(name) > 0
    first = Counter(kind(name) for step in steps[:6] for name, _ in step)
    last = Counter(kind(name) for step in steps[10:] for name, _ in step)
    assert min(first.values()) >= 4 and last[1] > 2 * (last[0] + last[2])


@pytest.mark.parametrize("more", [{}, DYNAMIC, AHEAD], ids=["plain", "dynamic", "ahead"])
def test_a_killed_run_resumes_with_the_same_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Killed in the middle of step 6; the checkpoint is that of step 3."""
    whole = run(tmp_path, "whole", **more)
    step = Controller.step

    def stopping(self: Controller) -> Any:
        if self.steps_done == 5:
            (tmp_path / "run" / "rollouts" / "marker").touch()
            raise SystemExit("killed")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "step", stopping)
        patch.setattr("sixfold.run.last_step.LastStep.save_after", lambda self, error: None)
        with pytest.raises(SystemExit):
            run(tmp_path, "run", **more)
    (tmp_path / "run" / "rollouts" / "marker").unlink()
    assert [line["step"] for line in history(tmp_path / "run")] == [2, 4]
    resumed = run(tmp_path, "run", resume=True, **more)
    assert [line["step"] for line in history(resumed)] == [2, 4, 6, 8]
    if not more.get("rollout__staleness"):
        assert history(resumed) == history(whole) and trained(resumed) == trained(whole)
        weights = [sorted(f.glob("checkpoints/*/model/*.safetensors")) for f in (whole, resumed)]
        assert [a.read_bytes() for a in weights[0]] == [b.read_bytes() for b in weights[1]]
    drawn = [name for step_ in trained(resumed) for name, _ in step_]
    assert len(drawn) == 8 * 4


def test_groups_that_dynamic_sampling_replaces_count(tmp_path: Path) -> None:
    """Otherwise the tasks that are always solved would never leave."""
    folder = run(tmp_path, "run", **DYNAMIC)
    seen = sum(n for line in history(folder) for _, n in line["seen"].values())
    lines = metrics(folder)
    kept = 4 * 4
    sampled = sum(kept * (1 + line["dynamic/extra_frac"]) for line in lines)
    assert seen == round(sampled) > 8 * kept
    buckets = Counter(to for line in history(folder) for _, _, to, _ in line["moved"])
    assert buckets["easy"] and buckets["hard"]


def test_groups_that_a_run_ahead_skips_count_too(tmp_path: Path) -> None:
    folder = run(tmp_path, "run", **AHEAD, **DYNAMIC)
    seen = sum(n for line in history(folder) for _, n in line["seen"].values())
    sampled = sum(16 * (1 + line["dynamic/extra_frac"]) for line in metrics(folder))
    assert seen == round(sampled) > 8 * 16


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, AHEAD], ids=["in turn", "ahead"])
def test_all_ranks_decide_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    """Each rank plays other tasks, and the history has those of both."""
    settings = {**SETTINGS, "run__steps": 4, "eval__metric": "", "sft__steps": 2, **more}
    flags = tiny_recipe(tmp_path, **settings, run__name="ranks")
    ranks = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
    assert ranks.codes() == [0, 0], ranks.errors()
    folder = tmp_path / "ranks"
    found = history(folder)
    assert [line["step"] for line in found] == [2, 4]
    names = [name for step in trained(folder) for name, _ in step]
    assert set(names) == {name for line in found for name in line["seen"]}
    if not more:
        alone = tmp_path / "alone"
        flags = tiny_recipe(tmp_path, **settings, run__name="alone")
        assert train.run(["demo", *flags]) == 0
        assert history(alone) == found


def test_a_schedule_that_followed_a_curriculum_is_not_replayed(tmp_path: Path) -> None:
    flags = tiny_recipe(tmp_path, **{**SETTINGS, "eval__metric": ""}, **AHEAD, run__name="run")
    assert train.run(["demo", *flags]) == 0
    with pytest.raises(UserError, match=r"data.curriculum.every > 0.*cannot be replayed"):
        train.run(["--replay-schedule", str(tmp_path / "run")])


def test_a_resume_cannot_begin_a_curriculum(tmp_path: Path) -> None:
    run(tmp_path, "run", data__curriculum__every=0, run__steps=3)
    with pytest.raises(UserError, match=r"data.curriculum.every cannot change from 0 to 2"):
        run(tmp_path, "run", resume=True)


KEY = ProfileKey("weights", "template", {"temperature": 1.0}, {"rewards": "check"})


def measured(task: Task, solved: int) -> Measurement:
    rewards = (1.0,) * solved + (0.0,) * (8 - solved)
    return Measurement(task_key(task), task.id, 0, solved, rewards)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    file = ProfileFile(tmp_path / "rates.jsonl", KEY)
    for i, task in enumerate(TASKS):
        file.add(measured(task, (8, 4, 0)[i % 3]))
    file.close()
    return tmp_path / "rates.jsonl"


def test_a_run_starts_from_stored_pass_rates(tmp_path: Path, stored: Path) -> None:
    folder = run(tmp_path, "run", run__steps=2, data__curriculum__profile=str(stored))
    assert {kind(name) for step in trained(folder) for name, _ in step} == {1}
    assert metrics(folder)[0]["data/easy_frac"] == pytest.approx(8 / 24)


def test_a_profile_of_other_tasks_is_refused(tmp_path: Path, stored: Path) -> None:
    other = [Task("task-0", "another prompt", answer=0)]
    with pytest.raises(UserError, match=r"none of the 1 training tasks.*same prompts"):
        read_pass_rates(stored, other)
    assert read_pass_rates(stored, TASKS[:2]) == {"task-0": (1.0, 8.0), "task-1": (0.5, 8.0)}


@pytest.mark.parametrize(
    "setting, named",
    [
        (dict(data__curriculum__hard=0.95), r"hard = 0.95 must be below.*easy = 0.9"),
        (dict(data__curriculum__profile="nowhere.jsonl"), r"nowhere.jsonl: there is no such file"),
        (
            dict(data__curriculum__every=0, data__curriculum__profile="a.jsonl"),
            r"profile has no effect with data.curriculum.every = 0",
        ),
    ],
)
def test_contradicting_settings_are_refused(
    tmp_path: Path, setting: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        run(tmp_path, "run", **setting)
