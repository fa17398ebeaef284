"""Runs with a curriculum: resumed, ahead of the trainer, on several ranks, and refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sixfold.commands import train
from sixfold.controller.ledger import Ledger
from sixfold.controller.loop import Controller
from sixfold.data.profile import Measurement, ProfileFile, ProfileKey, task_key
from sixfold.errors import UserError
from sixfold.recipe.toml import parse_recipe
from sixfold.report.notes import FILE as NOTES
from sixfold.report.rollouts import read_rollouts
from sixfold.run.assemble import Assembly
from sixfold.run.curriculum import read_pass_rates
from sixfold.run.profile_key import profile_key
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


@pytest.mark.mostly_nightly(1)
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


@pytest.mark.nightly
def test_groups_that_a_run_ahead_skips_count_too(tmp_path: Path) -> None:
    folder = run(tmp_path, "run", **AHEAD, **DYNAMIC)
    seen = sum(n for line in history(folder) for _, n in line["seen"].values())
    sampled = sum(16 * (1 + line["dynamic/extra_frac"]) for line in metrics(folder))
    assert seen == round(sampled) > 8 * 16


@pytest.mark.slow
def test_all_ranks_decide_the_same(tmp_path: Path) -> None:
    """Each rank plays other tasks, and the history has those of both."""
    small = {"run__steps": 2, "data__curriculum__every": 1, "data__limit": 24, "data__heldout": 4}
    settings = {**SETTINGS, **small, "eval__metric": ""}
    flags = tiny_recipe(tmp_path, **settings, run__name="ranks")
    ranks = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
    assert ranks.codes() == [0, 0], ranks.errors()
    folder = tmp_path / "ranks"
    found = history(folder)
    assert [line["step"] for line in found] == [1, 2]
    names = [name for step in trained(folder) for name, _ in step]
    assert set(names) == {name for line in found for name in line["seen"]}
    flags = tiny_recipe(tmp_path, **settings, run__name="alone")
    assert train.run(["demo", *flags]) == 0
    assert history(tmp_path / "alone") == found


@pytest.mark.nightly
def test_a_schedule_that_followed_a_curriculum_is_not_replayed(tmp_path: Path) -> None:
    flags = tiny_recipe(tmp_path, **{**SETTINGS, "eval__metric": ""}, **AHEAD, run__name="run")
    assert train.run(["demo", *flags]) == 0
    with pytest.raises(UserError, match=r"data.curriculum.every > 0.*cannot be replayed"):
        train.run(["--replay-schedule", str(tmp_path / "run")])


def test_a_resume_cannot_begin_a_curriculum(tmp_path: Path) -> None:
    run(tmp_path, "run", data__curriculum__every=0, run__steps=3)
    with pytest.raises(UserError, match=r"data.curriculum.every cannot change from 0 to 2"):
        run(tmp_path, "run", resume=True)


@pytest.mark.parametrize(
    "more, warned",
    [
        (dict(data__curriculum__samples=2), ""),
        (dict(data__curriculum__samples=8), "every 6 steps and has at most 4.02 samples"),
        (dict(data__curriculum__samples=8, data__curriculum__half_life=6), ""),  # 4 / (1 - 1/2)
        (dict(data__curriculum__samples=8, data__curriculum__half_life=5.9), "at most 7.91"),
    ],
)
def test_samples_that_no_task_reaches_are_named(
    tmp_path: Path, more: dict[str, Any], warned: str
) -> None:
    """24 tasks, 4 prompts a step, 4 samples of each: half-lives count from 6 steps on."""
    more = {"data__curriculum__half_life": 0.75, "run__steps": 1, **more}
    file = run(tmp_path, "run", **more) / NOTES
    notes = file.read_text() if file.is_file() else ""
    assert ("can be judged by the curriculum" in notes) is bool(warned) and warned in notes


@pytest.mark.parametrize("more", [{}, AHEAD], ids=["in turn", "ahead"])
def test_prompts_that_are_set_aside_are_not_in_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """All others are solved and have left. A run ahead would skip those 4 for ever."""
    drop, dropped = Ledger.drop, [0]

    def counting(self: Ledger, number: int) -> None:
        dropped[0] += 1
        assert dropped[0] < 100
        drop(self, number)

    def solved(completion: str, task: Task) -> float:
        if int(task.answer) < 4:
            raise ValueError("a bad prompt")
        return 1.0

    monkeypatch.setattr(Ledger, "drop", counting)
    settings = {**SETTINGS, "run__steps": 8, "rollout__max_failures": 1, **more}
    flags = tiny_recipe(
        tmp_path, **{**settings, "environment__error_budget": 1.0, "data__curriculum__retest": 0}
    )
    recipe = parse_recipe("run.name = 'run'", "test", flags)
    assert train_run(recipe, reward=solved, tasks=TASKS[:12]) == 0
    last = metrics(tmp_path / "run")[-1]
    assert (last["data/easy_frac"], last["data/spared"]) == (8 / 12, 4.0)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_whole_steps_are_of_one_source(tmp_path: Path, every: int) -> None:
    """Also those that a curriculum draws, and after dynamic sampling has replaced groups."""
    text = "[data]\nwhole_steps = true\n"
    for name in ("one", "two"):
        rows = [{"question": f"{n}+{len(name)}=", "answer": n + 3} for n in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text += f"[[data.sources]]\nsource = '{tmp_path / name}.jsonl'\nname = '{name}'\n"
    flags = tiny_recipe(
        tmp_path, run__name="run", run__steps=6, sft__steps=0, data__heldout=2,
        data__curriculum__every=every, rollout__prompts_per_step=2, log__rollouts_every=1,
        **DYNAMIC,
    )  # fmt: skip
    assert train_run(parse_recipe(text, "test", flags)) == 0
    steps = [
        {row["source"] for row in read_rollouts(file)}
        for file in sorted((tmp_path / "run" / "rollouts").glob("*"))
    ]
    assert len(steps) == 6 and all(len(sources) == 1 for sources in steps)
    assert set.union(*steps) == {"one", "two"}
    assert sum(line["dynamic/extra_frac"] for line in metrics(tmp_path / "run")) > 0


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


@pytest.mark.nightly
def test_a_run_starts_from_stored_pass_rates(tmp_path: Path, stored: Path) -> None:
    """A resumed run has them in its checkpoint and does not need the file."""
    more: dict[str, Any] = dict(data__curriculum__profile=str(stored), checkpoint__every=1)
    folder = run(tmp_path, "run", run__steps=2, **more)
    assert {kind(name) for step in trained(folder) for name, _ in step} == {1}
    assert metrics(folder)[0]["data/easy_frac"] == pytest.approx(8 / 24)
    assert (folder / NOTES).read_text().count("measured with other weights (weights, here ") == 1
    stored.unlink()
    run(tmp_path, "run", resume=True, **{**more, "run__steps": 4})
    assert {kind(name) for step in trained(folder) for name, _ in step} == {1}
    assert "measured with" not in (folder / NOTES).read_text().partition("resumed")[2]


def test_the_model_and_settings_of_a_profile_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Path
) -> None:
    keys: list[ProfileKey] = []

    def kept_key(assembly: Assembly) -> ProfileKey:
        keys.append(profile_key(assembly))
        return keys[-1]

    def notes(name: str, key: ProfileKey) -> str:
        stored.write_text(
            "\n".join([json.dumps({"profile": 1, "key": asdict(key)}), *lines[1:], ""])
        )
        folder = run(tmp_path, name, run__steps=1, data__curriculum__profile=str(stored))
        return (folder / NOTES).read_text() if (folder / NOTES).is_file() else ""

    monkeypatch.setattr("sixfold.run.curriculum.profile_key", kept_key)
    lines = stored.read_text().splitlines()
    assert "measured with other weights" in notes("other", KEY)
    assert "measured with" not in notes("same", keys[0])
    other = replace(keys[0], sampling={**keys[0].sampling, "top_p": 0.5})
    assert "measured with other sampling.top_p (0.5, here 1.0)" in notes("sampling", other)


def test_a_profile_of_other_tasks_is_refused(tmp_path: Path, stored: Path) -> None:
    other = [Task("task-0", "another prompt", answer=0)]
    with pytest.raises(UserError, match=r"none of the 1 training tasks.*same prompts"):
        read_pass_rates(stored, other)
    rates, key = read_pass_rates(stored, TASKS[:2])
    assert rates == {"task-0": (1.0, 8.0), "task-1": (0.5, 8.0)} and key == KEY


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
