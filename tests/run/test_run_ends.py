"""Ends of a run: steps, wall time, target reward. Files that a run without RL leaves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from torch import Tensor

import sixfold
from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, LossOutput
from sixfold.errors import UserError
from sixfold.files.folder import MARKER
from sixfold.recipe.schema import Recipe, RunConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.report.notes import read_notes
from sixfold.run.ending import PACE_STEPS, TARGET_AFTER, Pace, why_ended
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import metrics, tiny_recipe


def recipe(folder: Path, **overrides: object) -> Recipe:
    return parse_recipe('run.name = "r"', "test", tiny_recipe(folder, run__name="r", **overrides))


@pytest.mark.slow
def test_it_ends_at_the_reward_aimed_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that is always the same: the average is there from the first step, and counts from
    the tenth. All groups are degenerate.
    """
    assert (
        train_run(
            recipe(tmp_path, run__steps=50, run__target_reward=0.5),
            reward=lambda completion, task: 0.5,
        )
        == 0
    )
    steps = metrics(tmp_path / "r")
    assert len(steps) == TARGET_AFTER and {step["reward/ema"] for step in steps} == {0.5}
    assert {step["group/degenerate_frac"] for step in steps} == {1.0}
    assert all(step["train/skipped"] == 1.0 and step["sync/version"] == 0.0 for step in steps), (
        "no signal: no forward, no update, no new version"
    )
    assert (tmp_path / "r" / "checkpoints" / "step-000010" / "manifest.json").exists()
    ended = json.loads((tmp_path / "r" / "summary.json").read_text())["ended"]
    assert (
        ended["reason"] == "target_reward"
        and ended["step"] == TARGET_AFTER
        and "run.target_reward = 0.5" in ended["text"]
    )
    assert f"finished: {ended['text']}" in capsys.readouterr().err


@pytest.mark.slow
def test_one_high_reward_step_does_not_end_a_run(tmp_path: Path) -> None:
    """The first value of the moving average is that of one step: with a target, a first step of 1.0
    used to end a run of 50.
    """
    calls = count(1)

    def lucky(completion: str, task: Task) -> float:
        return float(next(calls) <= 60)

    assert train_run(recipe(tmp_path, run__steps=12, run__target_reward=0.9), reward=lucky) == 0
    assert len(metrics(tmp_path / "r")) == 12


@pytest.mark.parametrize(("best", "ends"), [(0.0, False), (0.499, False), (0.5, True), (1.0, True)])
def test_it_ends_at_the_accuracy_aimed_for(best: float, ends: bool) -> None:
    ending = why_ended(RunConfig(steps=3, target_accuracy=0.5), 1, None, 0.0, best=best)
    assert (ending is not None) == ends
    assert ending is None or (ending.reason == "target_accuracy" and f"{best:.3f}" in ending.text)
    assert why_ended(RunConfig(steps=3), 1, None, 0.0, best=best) is None, "no target"


def test_text_of_an_end_has_the_steps_that_were_done() -> None:
    ending = why_ended(RunConfig(steps=3), 3, None, 0.0)
    assert ending is not None and ending.step == 3
    assert ending.text.startswith("3 of 3 steps")


@pytest.mark.slow
def test_fewer_steps_than_were_done_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    """Nor does a finished run take settings under which nothing is trained."""
    settings = {"run__steps": 4, "sft__steps": 0, "data__heldout": 0}
    assert train_run(recipe(tmp_path, **settings)) == 0
    run = tmp_path / "r"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != MARKER}
    with pytest.raises(UserError, match=r"run\.steps = 3, .* 4 steps .*set it to 4 .*or to 7"):
        train_run(recipe(tmp_path, **{**settings, "run__steps": 3}), resume=run)
    other = recipe(tmp_path, **settings, trainer__learning_rate=0.5)
    assert train_run(other, resume=run) == 0
    assert {p: p.read_bytes() for p in before} == before
    longer = recipe(tmp_path, **{**settings, "run__steps": 5})
    assert train_run(longer, resume=run) == 0
    assert len(metrics(run)) == 5 and "steps = 5" in (run / "recipe.toml").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_it_ends_when_the_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limited = {"run__steps": 100_000, "run__max_minutes": 0.025, "log__rollouts_every": 0}
    assert train_run(recipe(tmp_path, **limited)) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["steps"] < 100_000 and summary["seconds"] >= 1.5
    assert (
        summary["ended"]["reason"] == "max_minutes" and summary["ended"]["step"] == summary["steps"]
    )
    capsys.readouterr()
    before = {
        p: p.read_bytes()
        for p in (tmp_path / "r").rglob("*")
        if p.is_file() and p.name not in ("environment.json", ".sixfold-run")
    }
    assert train_run(recipe(tmp_path, **limited), resume=tmp_path / "r") == 0
    said = capsys.readouterr().err
    assert (
        "already finished: " in said
        and "run.max_minutes = 0.025" in said
        and "a larger --run.max_minutes" in said
    )
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_first_steps_tell_how_far_a_time_limit_reaches() -> None:
    """The first step ends after 150 s, the others take 10 s each. 540 s are allowed: after step 4,
    at 180 s, 36 more steps fit.
    """
    limits = RunConfig(steps=100, max_minutes=9)
    pace = Pace(limits)
    said = [pace.observe(step, 150.0 + 10.0 * (step - 1)) for step in range(1, 8)]
    assert [bool(text) for text in said] == [step == PACE_STEPS for step in range(1, 8)]
    warning = said[PACE_STEPS - 1]
    assert "run.max_minutes = 9 will end this run after about 40 of 100 steps" in warning
    assert "10 s" in warning and "--run.max_minutes 19" in warning  # 180 + 96 * 10 = 1140 s

    for enough in (RunConfig(steps=40, max_minutes=9), RunConfig(steps=100, max_minutes=0)):
        pace = Pace(enough)
        assert not any(pace.observe(step, 140.0 + 10.0 * step) for step in range(1, 8))
    resumed = Pace(limits)
    said = [resumed.observe(step, 10.0 * step) for step in range(20, 26)]
    assert "after about 54 of 100" in said[PACE_STEPS - 1]


@pytest.mark.slow
def test_a_run_says_how_far_its_time_limit_reaches_and_counts_down_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"{tmp_path}/mine.py:ends"  # its steps need no time limit, and end the run
    (tmp_path / "mine.py").write_text(ENDS)
    limited = {"run__steps": 10_000_000, "run__max_minutes": 10, "environment__rewards": reward}
    with pytest.raises(UserError, match="enough"):
        train_run(recipe(tmp_path, **limited))
    said = capsys.readouterr().err
    assert "run.max_minutes = 10 will end this run after about" in said
    left = re.findall(r"([\d:]+) left", said)
    assert left and all(re.fullmatch(r"\d:\d\d|10:00", time) for time in left)


ENDS = f"""
from itertools import count
checks = count()
def ends(completion, task):
    assert next(checks) < {16 * (PACE_STEPS + 2)}, "enough"
    return float(len(completion) % 2)
"""


PRINTS = """
def printing(completion, task):
    print("my check of", task.id)
    return 1.0
"""


@pytest.mark.slow
def test_what_a_reward_prints_is_in_a_file_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(PRINTS)
    given = recipe(tmp_path, run__steps=1, environment__rewards=f"{tmp_path}/mine.py:printing")
    assert train_run(given) == 0
    assert "my check of" not in "".join(capfd.readouterr())
    assert (tmp_path / "r" / "rewards.log").read_text().count("my check of arithmetic-") >= 16


@pytest.mark.slow
def test_a_schedule_that_jumps_when_a_run_is_extended_is_said_with_both_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cosine over 3 updates: 1, 3/4 and 1/4 of the rate, then 0. Over 6 updates, the fourth update
    has 1/2 of it.
    """
    settings = {"trainer__schedule": "cosine", "sft__steps": 0, "trainer__learning_rate": 1e-3}
    assert train_run(recipe(tmp_path, run__steps=3, **settings), reward=lengths) == 0
    assert [step["train/learning_rate"] for step in metrics(tmp_path / "r")] == pytest.approx(
        [1e-3, 7.5e-4, 2.5e-4]
    )
    capsys.readouterr()
    longer = recipe(tmp_path, run__steps=6, **settings)
    assert train_run(longer, resume=tmp_path / "r", reward=lengths) == 0
    (note,) = [
        note.text
        for note in read_notes(tmp_path / "r" / "notes.jsonl")
        if "trainer.learning_rate" in note.text
    ]
    assert "had 0.00025, the next one has 0.0005" in note and "would have had 0;" in note
    said = capsys.readouterr().err
    assert said.index("0.00025") < said.index("RL 4/6")
    assert metrics(tmp_path / "r")[3]["train/learning_rate"] == pytest.approx(5e-4)

    same = recipe(tmp_path, run__steps=7, **settings | {"trainer__schedule": "constant"})
    assert train_run(same, resume=tmp_path / "r", reward=lengths) == 0
    assert "learning rate (trainer.learning_rate)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_constant_schedule_is_extended_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, resume in ((2, None), (4, tmp_path / "r")):
        extended = recipe(tmp_path, run__steps=steps, sft__steps=0)
        assert train_run(extended, resume=resume, reward=lengths) == 0
    assert "learning rate" not in capsys.readouterr().err


def lengths(completion: str, task: Task) -> float:
    return float(len(completion) % 3)


@pytest.mark.slow
def test_only_the_warm_up(tmp_path: Path) -> None:
    assert train_run(recipe(tmp_path), stop_after="sft") == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (
        "heldout_after_sft" in summary
        and "heldout_after" not in summary
        and summary["sft_steps"] == 4
    )
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == [
        "sft-000004",
        "step-000000",
    ]


def test_too_many_failing_checks_stop_the_run(tmp_path: Path) -> None:
    def broken(completion: str, task: Task) -> float:
        raise RuntimeError("judge is down")

    with pytest.raises(UserError, match=r"16 of 16|judge is down"):
        train_run(recipe(tmp_path, data__heldout=0), reward=broken)


@pytest.mark.slow
def test_from_python_with_own_tasks_and_a_reward_in_trl_form(tmp_path: Path) -> None:
    def rewards(completions: list[str], answer: list[int], **kwargs: object) -> list[float]:
        return [float(str(a) in c) for c, a in zip(completions, answer, strict=True)]

    tasks = [
        Task(f"t{i}", f"{i}+{i}=", answer=2 * i, trace=f"#{2 * i}", columns={"answer": 2 * i})
        for i in range(30)
    ]
    flags = tiny_recipe(tmp_path, run__name="mine", run__steps=2)
    settings = {
        flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    folder = sixfold.train(reward=rewards, tasks=tasks[:24], heldout=tasks[24:], settings=settings)
    assert folder == tmp_path / "mine" and [m["step"] for m in metrics(folder)] == [1, 2]
    with pytest.raises(UserError, match="already holds a run"):
        sixfold.train(reward=rewards, tasks=tasks, settings=settings)


@pytest.mark.nightly
@pytest.mark.slow
def test_from_python_with_a_user_algorithm(tmp_path: Path) -> None:
    """The run is that of the named algorithm it computes the same as, resumed or not."""

    class Mine:
        needs_reference = False

        def __init__(self, measures: bool = False) -> None:
            self.measures = measures
            self.inner = make_algorithm(ZOO["dr_grpo"], 12)

        def prepare(self, batch: Batch) -> Batch:
            return self.inner.prepare(batch)

        def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
            output = self.inner.compute_loss(batch, logp)
            return (
                replace(output, sums={**output.sums, "my_share": output.loss.detach()})
                if self.measures
                else output
            )

    class WithAdvantages:
        """The same, with its first method named for what it computes."""

        needs_reference = False

        def __init__(self) -> None:
            mine = Mine(measures=True)
            self.compute_advantages, self.compute_loss = mine.prepare, mine.compute_loss

    def settings(name: str, **more: object) -> dict[str, object]:
        flags = tiny_recipe(tmp_path, run__name=name, run__steps=4, algorithm__beta=0.1, **more)
        return {
            flag.removeprefix("--"): value
            for flag, value in zip(flags[::2], flags[1::2], strict=True)
        }

    row = sixfold.train(
        algorithm=make_algorithm(replace(ZOO["ppo"], minibatches=2), 12), settings=settings("row")
    )
    same = sixfold.train(
        settings=settings("same", algorithm__name="ppo", algorithm__minibatches=2)
        | {"algorithm.beta": "0"}
    )
    assert metrics(row) == metrics(same) and "critic/loss" in metrics(row)[-1], (
        "a row made by replace gets its critic, passes and mini-batches"
    )
    own = sixfold.train(algorithm=Mine(), settings=settings("own"))
    named = sixfold.train(
        settings=settings("named", algorithm__name="dr_grpo") | {"algorithm.beta": "0"}
    )
    assert metrics(own) == metrics(named) and any(m["train/updates"] for m in metrics(own))
    more = metrics(
        sixfold.train(algorithm=WithAdvantages(), settings=settings("more", log__to="csv"))
    )
    assert [m.pop("custom/my_share", None) for m in more] == [
        m.get("train/loss") for m in metrics(own)
    ], "a key of its own is logged under custom/"
    assert (
        more == metrics(own)
        and "custom/my_share" in (tmp_path / "more" / "metrics.csv").read_text()
    )


@pytest.mark.slow
def test_one_heldout_task_with_a_real_valued_reward_has_a_wide_interval(tmp_path: Path) -> None:
    """Partial credit is not accuracy, and one task proves next to nothing."""
    assert (
        train_run(
            recipe(tmp_path, run__steps=1, data__heldout=1),
            reward=lambda completion, task: 0.25 + min(len(completion), 50) / 100,
        )
        == 0
    )
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["heldout_after"] == 0.0 and summary["heldout_after_score"] >= 0.25
    low, high = summary["heldout_after_interval"]
    assert low == 0.0 and 0.7 < high < 1
    difference = summary["heldout_difference"]
    assert difference["mean"] == 0.0 and difference["p_value"] == 1.0, (
        "of one task, before and after"
    )
