"""Prompts that always fail are set aside: trained never, lost never, and all others train once."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.controller.dead_letters import DeadLetters
from sixfold.controller.loop import Controller
from sixfold.errors import UserError
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.driver import Driver
from sixfold.run.start import train_run
from sixfold.types import Group, Reward, Task, Trajectory

from .processes import metrics, tiny_recipe

TASKS = [Task(f"task-{i}", f"{i % 10}+{i // 10}=", answer=i) for i in range(40)]
SETTINGS: dict[str, Any] = dict(
    run__steps=6, sft__steps=0, checkpoint__every=2, log__rollouts_every=1,
    rollout__max_failures=2, environment__error_budget=0.75,
)  # fmt: skip
AHEAD: dict[str, Any] = dict(rollout__staleness=1)


def bad(completion: str, task: Task) -> float:
    """A reward that raises for every fifth task."""
    if int(task.answer) % 5 == 0:
        raise ValueError(f"bad prompt {task.id}")
    return len(completion) / 12


def run(
    folder: Path, checks: Any, tasks: Sequence[Task] = TASKS, resume: bool = False, **more: Any
) -> Path:
    flags = tiny_recipe(folder, **{**SETTINGS, **more})
    recipe = parse_recipe("run.name = 'run'", "test", flags)
    again = folder / "run" if resume else None
    assert train_run(recipe, resume=again, reward=checks, tasks=tasks) == 0
    return folder / "run"


def trained(folder: Path) -> list[str]:
    rows = (row for file in sorted(folder.glob("rollouts/*")) for row in read_rollouts(file))
    return [row["task_id"] for row in rows if row["sample"] == 0]


def letters(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "dead_letters.jsonl").read_text().splitlines()]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Witness: how often the groups of each task were sampled to be trained."""
    counts: Counter[str] = Counter()
    play = Driver.play

    def counting(
        self: Driver, tasks: Sequence[Task], seed: int, scorer: Any = None, *given: Any
    ) -> Any:
        if scorer:
            counts.update(task.id for task in tasks)
        return play(self, tasks, seed, scorer, *given)

    monkeypatch.setattr(Driver, "play", counting)
    return counts


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("more", [{}, AHEAD], ids=["in turn", "ahead"])
def test_every_sampled_prompt_is_trained_or_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: Counter[str], more: dict[str, Any]
) -> None:
    """R-196: also if the run is killed a step after its last checkpoint, and resumed."""
    step = Controller.step

    def stopping(self: Controller) -> Any:
        if self.steps_done == 3:
            raise RuntimeError("killed")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "step", stopping)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, bad, **more)
    before = {letter["task"] for letter in letters(tmp_path / "run") if letter["step"] < 3}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    first = sampled.copy()
    sampled.clear()
    folder = run(tmp_path, bad, resume=True, **more)
    done, dead = trained(folder), [letter["task"] for letter in letters(folder)]
    assert len(done) == 24 and len(dead) == len(set(dead)) > 2
    assert not more or len(set(done)) == 24  # in turn, a task that fills a step comes again
    assert {*done, *dead} == {*first, *sampled}  # at the end nothing is open
    assert not set(done) & set(dead)
    assert all((first if task in before else sampled)[task] == 2 for task in dead)
    assert not any(sampled[task] for task in before)
    for letter in letters(folder):
        (task,) = [task for task in TASKS if task.id == letter["task"]]
        assert letter["prompt"] == task.prompt and letter["failures"] == 2
        assert f"bad prompt {task.id}" in letter["error"]
    counts = Counter(letter["step"] for letter in letters(folder))
    found = {line["step"]: line["rollout/dead_prompts"] for line in metrics(folder)}
    assert found == {number: counts[number] for number in range(1, 7)}


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("more", [{}, AHEAD], ids=["in turn", "ahead"])
def test_a_dead_prompt_is_not_sampled_in_later_epochs(
    tmp_path: Path, sampled: Counter[str], more: dict[str, Any]
) -> None:
    """Three epochs of 8 tasks, one of them bad. All steps are full. A second attempt does not
    count in the budget of the first: one prompt of 4 may fail.
    """
    more = {**more, "environment__error_budget": 0.25}
    folder = run(tmp_path, bad, TASKS[1:9], **more)
    # Ahead, the group of the next epoch may have started before.
    assert sampled["task-5"] in ((2, 4) if "rollout__staleness" in more else (2,))
    assert [letter["task"] for letter in letters(folder)] == ["task-5"]
    assert len(trained(folder)) == 24
    sampled.clear()
    run(tmp_path, bad, TASKS[1:9], resume=True, run__steps=9, **more)
    assert sampled.total() >= 12 and not sampled["task-5"]


def test_two_groups_of_a_prompt_make_one_letter() -> None:
    """Ahead of the trainer, the group of the next epoch may be open too."""
    task, dead = Task("a", "?"), DeadLetters(2, [Task("a", "?"), Task("b", "?")])
    group = Group(
        task, [Trajectory("a", 0, [1], "p", [0.0], [-1], (), reward=Reward(None, error="x"))]
    )

    async def play(tasks: Sequence[Task], attempt: int) -> list[Group]:
        await asyncio.sleep(0)
        return [group]

    async def both() -> list[list[Group]]:
        return list(
            await asyncio.gather(dead.survivors([task], play), dead.survivors([task], play))
        )

    assert asyncio.run(both()) == [[], []]
    dead.take()
    assert [letter["task"] for letter in dead.taken] == ["a"]


def test_greedy_samples_count_in_the_budget_of_a_step(tmp_path: Path) -> None:
    """One of 4 prompts may fail, with its greedy sample."""
    more = {**AHEAD, "algorithm__name": "remax", "environment__error_budget": 0.25}
    folder = run(tmp_path, bad, TASKS[1:9], **more)
    assert [letter["task"] for letter in letters(folder)] == ["task-5"]


@pytest.mark.nightly
def test_a_prompt_that_fails_once_is_trained_with_the_same_tokens(
    tmp_path: Path, sampled: Counter[str]
) -> None:
    def at_first(completion: str, task: Task) -> float:
        if int(task.answer) % 5 == 0 and sampled[task.id] == 1:
            raise ValueError("too busy")
        return len(completion) / 12

    again = run(tmp_path / "again", at_first)
    assert max(sampled.values()) == 2
    plain = run(tmp_path / "plain", at_first, rollout__max_failures=0)  # sampled before
    assert trained(plain) == trained(again) and letters(again) == []
    assert not (plain / "dead_letters.jsonl").exists()
    losses = [[line["train/loss"] for line in metrics(folder)] for folder in (plain, again)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("more", [{}, AHEAD], ids=["in turn", "ahead"])
def test_the_breaker_ends_a_run_in_which_too_much_fails(
    tmp_path: Path, sampled: Counter[str], more: dict[str, Any]
) -> None:
    def broken(completion: str, task: Task) -> float:
        if sampled:  # not before the first step, when the rewards are tried
            raise ValueError("the judge is gone")
        return 0.0

    with pytest.raises(RewardBudgetExceeded, match=r"(?s)error_budget = 0.75.*judge is gone"):
        run(tmp_path / "share", broken, **more)
    sampled.clear()
    more = {**more, "environment__error_budget": 1.0}
    with pytest.raises(UserError, match=r"all 8 prompts have failed 2 times.*judge is gone"):
        run(tmp_path / "all", broken, TASKS[:8], **more)


def test_a_source_that_no_step_draws_does_not_keep_a_run_alive() -> None:
    """Else a run ahead would look for its prompts for ever."""
    tasks = [Task(name, "?", source=name) for name in ("usual", "seldom", "never")]
    dead = DeadLetters(1, tasks, {"usual": 1.0, "seldom": 0.01, "never": 1e-17})
    failed = Trajectory(
        "t", 0, [1], "p", [0.0], [-1], (), reward=Reward(value=None, error="no judge")
    )

    async def play(given: Sequence[Task], attempt: int) -> list[Group]:
        return [Group(task, [failed]) for task in given]

    assert asyncio.run(dead.survivors(tasks[:1], play)) == []
    with pytest.raises(UserError, match=r"all 2 prompts have failed 1 times.*no judge"):
        asyncio.run(dead.survivors(tasks[1:2], play))


def test_a_budget_that_lets_no_prompt_fail_is_refused() -> None:
    recipe = Recipe().with_settings({"rollout.max_failures": 3, "rollout.prompts_per_step": 3})
    with pytest.raises(UserError, match=r"error_budget = 0.1 ends.*at least 0.3334"):
        make_plan(recipe)
    make_plan(recipe.with_settings({"environment.error_budget": 0.3334}))
