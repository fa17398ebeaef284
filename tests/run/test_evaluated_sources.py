"""Held-out figures by source, and a warm-up that waits for the weakest source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sixfold.evaluation.evaluate import SOURCE_TASKS, Evaluation
from sixfold.evaluation.record import record, shown, summary_entries
from sixfold.recipe.toml import parse_recipe
from sixfold.report.run_record import RunRecord
from sixfold.run.start import train_run
from sixfold.types import Group, Reward, Task, Trajectory

from .processes import tiny_recipe


def group(source: str, *solved: bool) -> Group:
    """A task of `source` with a trajectory for each of `solved`."""

    def trajectory(ok: bool) -> Trajectory:
        reward = Reward(float(ok), {}, score=float(ok), solved=ok)
        return Trajectory.one_turn("t", 0, [1], [2], [0.0], [0], "stop", reward=reward)

    return Group(Task("t", "", source=source), [trajectory(ok) for ok in solved])


def sums_and_words() -> Evaluation:
    """16 sums of which 12 are solved, 16 words solved in one of two samples, and one task of a
    third source.
    """
    sums = [group("sums", n < 12, n < 12) for n in range(SOURCE_TASKS)]
    return Evaluation(
        [
            *sums,
            *(group("words", True, False) for _ in range(SOURCE_TASKS)),
            group("one task", True, True),
        ]
    )


def test_shares_are_means_over_the_tasks_of_a_source() -> None:
    assert sums_and_words().by_source == {"sums": 0.75, "words": 0.5}
    metrics = sums_and_words().metrics()
    assert metrics["heldout/source/sums"] == 0.75 and "heldout/source/one task" not in metrics


def test_one_source_has_no_figures_of_its_own() -> None:
    assert Evaluation([group("sums", True) for _ in range(40)]).by_source == {}


def test_screen_and_summary_name_the_sources() -> None:
    found = record(sums_and_words())
    assert "sums 75.0%, words 50.0%" in shown(found)
    assert summary_entries("heldout_after", found)["heldout_after_sources"] == {
        "sums": 0.75,
        "words": 0.5,
    }


def test_the_report_draws_every_evaluation_of_a_source_the_first_and_last_included() -> None:
    run = RunRecord(
        Path("r"),
        metrics=[{"step": 1}, {"step": 2, "heldout/source/sums": 0.5}, {"step": 3}],
        summary={
            "steps": 3,
            "heldout_after_sft_sources": {"sums": 0.25},
            "heldout_after_sources": {"sums": 0.75},
        },
    )
    assert run.sources() == {"sums": [(0, 0.25), (2, 0.5), (3, 0.75)]}


def solved_if_of(source: str) -> Any:
    return lambda completion, task: float(task.source == source)


@pytest.mark.slow
@pytest.mark.parametrize(("of_words", "steps"), [(0, 10), (SOURCE_TASKS, 20)])
def test_the_warm_up_waits_for_the_weakest_source(
    tmp_path: Path, of_words: int, steps: int
) -> None:
    """Sums are always solved and words never: SFT may end at its first look at step 10 without
    words, and not with them.
    """
    tasks = [Task(f"s{n}", f"{n}+1=", answer=n + 1, source="sums") for n in range(40)]
    tasks += [Task(f"w{n}", f"{n}-1=", answer=n, source="words") for n in range(of_words)]
    settings = tiny_recipe(
        tmp_path,
        run__name="r",
        run__steps=0,
        sft__steps=20,
        sft__stop_at_accuracy=0.5,
        data__heldout=0,
    )
    assert (
        train_run(
            parse_recipe('run.name = "r"', "test", settings),
            tasks=tasks,
            reward=solved_if_of("sums"),
        )
        == 0
    )
    log = [json.loads(line) for line in (tmp_path / "r" / "sft.jsonl").read_text().splitlines()]
    assert len(log) == steps
