"""Verdicts in metrics, in the report and on screen."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sixfold.evaluation import record as evaluation_record
from sixfold.evaluation.evaluate import Evaluation
from sixfold.report.html import render
from sixfold.report.progress import Progress
from sixfold.report.rewards import reward_metrics
from sixfold.report.run_record import RunRecord
from sixfold.report.verdicts import ROWS, verdict_counts, verdict_line, verdict_view
from sixfold.types import NOT_APPLICABLE, Group, Reward, Task, Trajectory


def scored(rewards: Sequence[Reward]) -> list[Group]:
    made = [
        Trajectory.one_turn("t", k, [1], [2], [-1.0], [0], "stop", text=f"text {k}", reward=reward)
        for k, reward in enumerate(rewards)
    ]
    return [Group(Task("t", ""), made)]


PASSED = Reward(1.0, verdict="passed")
SLOW = Reward(0.0, verdict="timeout", detail="test 3 took 3 s")
FAILED = Reward.failed("code: no sandbox")


def test_shares_of_verdicts_have_all_trajectories_below() -> None:
    metrics = reward_metrics(scored([PASSED, PASSED, SLOW, FAILED]))
    shares = {key: value for key, value in metrics.items() if "verdict" in key}
    assert shares == {
        "reward/verdict/passed": 0.5,
        "reward/verdict/timeout": 0.25,
        "reward/verdict/infrastructure_error": 0.25,
    }
    plain = reward_metrics(scored([Reward(1.0), Reward(0.0)]))
    assert not any("verdict" in key or "rerun" in key or "format" in key for key in plain)


def test_samples_to_which_no_reward_applies_are_no_failed_checks() -> None:
    aside = Reward(None, error=NOT_APPLICABLE)
    mixed = reward_metrics(scored([PASSED, SLOW, FAILED, aside]))
    assert (mixed["reward/error_frac"], mixed["reward/not_applicable_frac"]) == (0.25, 0.25)
    assert mixed["reward/mean"] == 0.5
    none = reward_metrics(scored([aside, aside]))
    assert (none["reward/error_frac"], none["reward/not_applicable_frac"]) == (0.0, 1.0)
    assert "reward/mean" not in none
    assert "reward/not_applicable_frac" not in reward_metrics(scored([PASSED]))
    evaluation = Evaluation(scored([PASSED, FAILED, aside]))
    assert (evaluation.errors, evaluation.not_applicable) == (1, 1)
    line = evaluation_record.shown(evaluation_record.record(evaluation))
    assert "1 checks failed" in line and "no reward applies to 1 samples" in line


def parts(form: float, right: float, weight: float = 0.5) -> Reward:
    return Reward(
        weight * form + right,
        {"form": form, "right": right},
        score=right,
        decided_by="right",
        weights={"form": weight, "right": 1.0},
    )


def test_share_of_wrong_completions_that_are_paid_for_their_format() -> None:
    """Counts wrong completions with a reward for the format. Right, partly right, unrewarded and
    fined completions do not count.
    """
    rewards = [parts(1, 0), parts(1, 1), parts(1, 0.5), parts(0, 0), parts(1, 0, -0.5)]
    metrics = reward_metrics(scored([*rewards, FAILED]))
    assert metrics["reward/frac_format_only"] == 1 / 5


def test_durations_and_reruns_of_checks() -> None:
    rewards = [
        Reward(1.0, seconds=s + 1.0, latency={"fast": 1.0, "slow": s}, reruns=int(s == 100.0))
        for s in map(float, range(1, 101))
    ]
    metrics = reward_metrics(scored(rewards))
    assert (metrics["time/check_p50_s"], metrics["time/check_p99_s"]) == (52.0, 101.0)
    assert (metrics["time/check_p50_s/slow"], metrics["time/check_p99_s/slow"]) == (51.0, 100.0)
    assert metrics["time/check_p99_s/fast"] == 1.0 and metrics["reward/rerun_frac"] == 0.01


def test_counts_are_in_the_order_of_the_contract() -> None:
    counts = verdict_counts([FAILED, SLOW, None, PASSED, SLOW, Reward(1.0)])
    assert list(counts.items()) == [("passed", 1), ("timeout", 2), ("infrastructure_error", 1)]
    assert verdict_line(counts, 5) == "passed 20%, timeout 40%, infrastructure_error 20%"
    assert verdict_line({}, 5) == ""


def record(steps: int, dumps: Sequence[tuple[int, Sequence[Reward]]] = ()) -> RunRecord:
    metrics: list[dict[str, Any]] = [
        {"step": step, "reward/verdict/passed": step / 100} for step in range(1, steps + 1)
    ]
    metrics[-1]["reward/verdict/timeout"] = 0.125
    dumped = [
        (step, [{**t.to_record(), "task_id": f"t{step}"} for t in scored(r)[0].trajectories])
        for step, r in dumps
    ]
    return RunRecord(Path("run"), metrics=metrics, dumps=dumped)


def test_the_table_has_the_first_and_the_last_step_and_zeros() -> None:
    view = verdict_view(record(100))
    assert view is not None and view.names == ["passed", "timeout"]
    assert len(view.rows) == ROWS
    assert (view.rows[0].step, view.rows[0].shares) == (1, ["1.0%", "0.0%"])
    assert (view.rows[-1].step, view.rows[-1].shares) == (100, ["100.0%", "12.5%"])
    assert len(verdict_view(record(3)).rows) == 3
    assert verdict_view(RunRecord(Path("run"), metrics=[{"step": 1, "reward/mean": 1.0}])) is None


def test_examples_are_the_latest_of_each_fault_with_its_reason() -> None:
    view = verdict_view(record(9, [(1, [SLOW]), (9, [PASSED, SLOW, SLOW, SLOW, FAILED])]))
    assert view is not None
    found = [(e.verdict, e.about, e.why, e.text) for e in view.examples]
    assert found == [
        ("timeout", "step 9, task t9, sample 1", "test 3 took 3 s", "text 1"),
        ("timeout", "step 9, task t9, sample 2", "test 3 took 3 s", "text 2"),
        ("infrastructure_error", "step 9, task t9, sample 4", "code: no sandbox", "text 4"),
    ]


def test_the_report_shows_verdicts_and_escapes_their_reasons() -> None:
    hostile = Reward(0.0, verdict="rejected", detail="<script>alert(1)</script>")
    page = render(record(2, [(2, [hostile])]))
    section = page[page.index('id="verdicts"') : page.index('id="samples"')]
    assert "12.5%" in section and "rejected" in section
    assert "&lt;script&gt;" in section and "<script" not in page


def test_the_report_shows_the_weight_of_each_part() -> None:
    run = record(3, [(3, [parts(1, 0)])])
    for metrics in run.metrics:
        metrics |= {"reward/part/form": 1.0, "reward/part/right": 0.0}
    page = render(run)
    assert "form (weight 0.5)" in page and "right (weight 1)" in page
    run.dumps[0][1][0]["reward"]["weights"] = {"form": "many"}
    assert "form (weight" not in render(run)


@pytest.mark.parametrize("timeout", [0.0, 0.25])
def test_the_display_shows_verdicts_that_are_neither_right_nor_wrong(timeout: float) -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=200)) as shown:
        shown.stage("RL", 1)
        shares = {"passed": 0.5, "wrong_answer": 0.25, "timeout": timeout}
        shown.update({"step": 1} | {f"reward/verdict/{n}": s for n, s in shares.items()})
    assert ("verdicts timeout 25%" in stream.getvalue()) == bool(timeout)
    assert "passed" not in stream.getvalue()


def test_a_dump_keeps_verdicts() -> None:
    """Also through JSON, as in the file."""
    trajectory = scored([SLOW])[0].trajectories[0]
    again = Trajectory.from_record(json.loads(json.dumps(trajectory.to_record())))
    assert again.reward == SLOW
