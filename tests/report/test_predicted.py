"""Predicted against measured by phase: medians and ratios by hand, and the alarm over 25 %."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.report.alarms import WINDOW, Alarms
from sixfold.report.html import write_report
from sixfold.report.loggers import JsonlLogger
from sixfold.report.predicted import LEAST_STEPS, compare, step_figures
from sixfold.report.prediction import FILE, PHASES, STEP, Lengths
from sixfold.report.prediction_view import prediction_text, prediction_view
from sixfold.report.run_record import read_run
from sixfold_planning.architectures import dense_of_size
from sixfold_planning.hardware import Cluster, find_accelerator
from sixfold_planning.placed import Placed
from sixfold_planning.prediction import Prediction
from sixfold_planning.workload import Workload

LENGTHS = Lengths(prompt=100.0, mean=300.0, longest=900.0)
PREDICTION = Prediction(
    arch=dense_of_size(7),
    cluster=Cluster(find_accelerator("H100"), 8),
    measured=False,
    work=Workload(
        prompts=256,
        samples=8,
        prompt_tokens=128,
        mean_tokens=512,
        longest_tokens=1024,
        packed=8192,
        recompute="full",
        adapters=False,
        shared_prompt=True,
        reference=True,
        critic=False,
        shared_weights=True,
    ),
    placed=Placed(),
    first_step=1,
    memory_bytes=40_000_000_000,
)


def logged(factors: Mapping[str, float] | None = None, waiting: float = 0.0) -> dict[str, float]:
    """Metrics of a step in which each phase takes its prediction for LENGTHS, times a factor."""
    seconds = PREDICTION.seconds(LENGTHS)
    factors = factors or {}
    return {
        **{f"time/{phase}_s": seconds[phase] * factors.get(phase, 1.0) for phase in PHASES},
        "time/environment_s": waiting,
        "time/log_s": 50.0,
        "time/eval_s": 70.0,
        "rollout/tokens": 2048 * 300.0,
        "rollout/prompt_tokens": 2048 * 100.0,
        "rollout/length_mean": 300.0,
        "rollout/length_max": 900.0,
    }


def rung(steps: list[dict[str, float]], prediction: Prediction | None = PREDICTION) -> list[str]:
    """Alarms of a run that ends after these steps."""
    alarms = Alarms(prediction=prediction)
    return [line for step in steps for line in alarms.observe(step)] + alarms.observe_end()


def test_prompts_and_completions_are_counted_with_discarded_samples_and_turns() -> None:
    """12 completions of 20 tokens and prompts of 50, of which 8 are kept: 12 x 50 prompt tokens."""
    step = {"rollout/tokens": 240, "rollout/prompt_tokens": 600, "rollout/length_mean": 20.0}
    figures = step_figures({**step, "rollout/length_max": 31, "time/rollout_s": 2.0})
    counted = {key: figures[key] for key in ("prompts", "replies", "mean", "longest")}
    assert counted == {"prompts": 600.0, "replies": 12.0, "mean": 20.0, "longest": 31.0}
    assert step_figures({**step, "rollout/turns_mean": 2.0})["replies"] == 24.0


def test_ahead_replies_may_all_arrive_in_other_steps() -> None:
    """Then a step counts no token, and lengths are those of all steps together."""
    whole, sums = logged(), ("rollout/tokens", "rollout/prompt_tokens")
    none = whole | dict.fromkeys(sums, 0.0)
    double = whole | {key: 2 * whole[key] for key in sums}
    expected = compare(PREDICTION, [step_figures(whole)]).lengths
    found = compare(PREDICTION, list(map(step_figures, (none, double, double, none))))
    assert expected is not None and found.lengths == expected
    assert compare(PREDICTION, [step_figures(none)]).lengths is None


def test_a_phase_is_the_median_and_the_step_the_sum_of_its_parts() -> None:
    """Scoring counts as reference. Checks count for the step; logging and evaluation do not."""
    times = {"rollout": 4.0, "environment": 0.5, "batch": 0.25, "scoring": 1.0, "algorithm": 0.125}
    steps = [
        {f"time/{name}_s": seconds for name, seconds in times.items()}
        | {"time/trainer_s": trainer, "time/sync_s": 0.5, "time/log_s": 9.0, "time/total_s": 99.0}
        for trainer in (2.0, 100.0, 3.0)
    ]
    found = compare(PREDICTION, [step_figures(step) for step in steps])
    measured = {phase.name: phase.measured for phase in found.phases}
    assert measured == {
        "rollout": 4.0,
        "reference": 1.0,
        "trainer": 3.0,
        "sync": 0.5,
        "step": 4.0 + 0.5 + 0.25 + 1.0 + 0.125 + 3.0 + 0.5,
    }
    assert found.lengths is None  # none were logged
    assert {p.name: p.predicted for p in found.phases} == PREDICTION.seconds()


def test_groups_that_are_not_trained_on_shorten_the_predicted_training() -> None:
    """Half of the groups have equal rewards: the trainer gets the work of half of the prompts."""
    tokens = 2048 * 300 + 256 * 100  # a prompt counts once for its 8 samples
    steps = [step_figures(logged() | {"train/tokens": n * tokens}) for n in (0.25, 0.5, 0.75)]
    found = compare(PREDICTION, steps)
    assert found.trained_share == 0.5
    predicted = {phase.name: phase.predicted for phase in found.phases}
    half = replace(PREDICTION, work=replace(PREDICTION.work, prompts=128)).seconds(LENGTHS)
    whole = PREDICTION.seconds(LENGTHS)
    assert predicted == {
        **whole,
        "trainer": half["trainer"],
        "step": pytest.approx(whole["step"] - whole["trainer"] + half["trainer"]),
    }
    # The tokens of a step are those of all its epochs.
    twice = replace(PREDICTION, work=replace(PREDICTION.work, epochs=2))
    full = step_figures(logged() | {"train/tokens": 2 * tokens})
    assert compare(twice, [full]).trained_share == 1.0
    nothing = compare(PREDICTION, [step_figures(logged() | {"train/tokens": 0})])
    assert {p.name: p.predicted for p in nothing.phases}["trainer"] == 0.0


def test_the_prediction_is_repeated_for_the_measured_lengths() -> None:
    found = compare(PREDICTION, [step_figures(logged())] * 3)
    assert found.lengths == LENGTHS
    assert [phase.ratio for phase in found.phases] == pytest.approx([1.0] * len(found.phases))
    # With the lengths assumed before the run, half of the bounds, it would have been wrong.
    assumed = PREDICTION.seconds()
    assert assumed["trainer"] > 1.25 * PREDICTION.seconds(LENGTHS)["trainer"]


@pytest.mark.parametrize("phase", ["rollout", "reference", "trainer"])
@pytest.mark.parametrize("factor", [1.24, 1.26, 0.76, 0.74])
def test_alarm_rings_at_26_percent_and_not_at_24(phase: str, factor: float) -> None:
    said = rung([logged()] + [logged({phase: factor})] * (3 * WINDOW))
    assert rung([logged()] * (3 * WINDOW)) == []
    if abs(factor - 1) < 0.25:
        assert said == []
        return
    (line,) = said
    seconds = PREDICTION.seconds(LENGTHS)[phase]
    assert line.startswith(f"{phase} takes {factor:.0%} of the predicted time")
    shown = [float(number) for number in re.findall(r"(?:time:|predicted) (\d[\d.]*)", line)]
    assert shown == pytest.approx([factor * seconds, seconds], rel=0.01)
    assert "prompts of 100 tokens, completions of 300, the longest 900" in line
    remedy = "look at" if factor > 1 else "sixfold plan --measure"
    assert remedy in line


def test_a_step_that_waits_for_checks_is_an_alarm_of_its_own() -> None:
    whole = PREDICTION.seconds(LENGTHS)[STEP]
    assert rung([logged()] + [logged(waiting=0.24 * whole)] * WINDOW) == []
    (line,) = rung([logged()] + [logged(waiting=0.26 * whole)] * WINDOW)
    assert line.startswith("a step takes 126% of") and "time/environment_s" in line


def test_ahead_the_trainer_waits_for_samples_and_checks() -> None:
    """Twice as long checks as all phases: a step is half of the sum, and the trainer waits."""
    whole = PREDICTION.seconds(LENGTHS)
    ahead = replace(PREDICTION, placed=Placed(staleness=1))
    check = 2 * whole[STEP]
    found = ahead.seconds(LENGTHS._replace(check=check))
    assert found[STEP] == pytest.approx((whole[STEP] + check) / 2, rel=1e-3)
    trains = sum(whole[phase] for phase in ("reference", "trainer", "sync"))
    assert found["rollout"] == pytest.approx(found[STEP] - trains)
    step = {**logged(), "time/rollout_s": found["rollout"], "time/check_p50_s": check}
    assert rung([step] * (3 * WINDOW), ahead) == []
    (line,) = rung([step | {"time/rollout_s": 1.6 * found["rollout"]}] * WINDOW, ahead)[:1]
    assert "checks of" in line


@pytest.mark.parametrize(("trained_share", "longer"), [(0.02, "rollout"), (1.0, "trainer")])
def test_ahead_on_one_device_training_takes_longer_while_both_compute(
    trained_share: float, longer: str
) -> None:
    """Twice as long while samplers compute too. The rest of the step is the wait for samples."""
    given = replace(PREDICTION, work=replace(PREDICTION.work, reference=False))
    ahead = replace(given, placed=Placed(staleness=1, slowdown=2.0))
    alone = given.seconds(LENGTHS, trained_share)
    found = ahead.seconds(LENGTHS, trained_share)
    assert max(("rollout", "trainer"), key=lambda phase: alone[phase]) == longer
    assert sum(found[phase] for phase in PHASES) == pytest.approx(found[STEP], rel=1e-3)
    trains = found["trainer"] + found["sync"]
    assert trains / found["trainer"] == pytest.approx(1 + alone["sync"] / alone["trainer"])
    if longer == "rollout":
        assert found["trainer"] == pytest.approx(2 * alone["trainer"])
    else:  # samples always wait
        assert trains == pytest.approx(found[STEP], rel=1e-3)


def test_the_first_step_does_not_count_and_two_more_are_too_few() -> None:
    slow = logged({"trainer": 3.0})
    assert rung([slow] + [logged()] * (3 * WINDOW)) == []
    assert rung([logged()] + [slow] * (LEAST_STEPS - 1)) == []
    assert any("trainer" in line for line in rung([logged()] + [slow] * LEAST_STEPS))


def test_half_a_percent_of_the_step_is_no_alarm() -> None:
    """The sync is predicted as 0 seconds for shared weights, and takes microseconds."""
    prediction = PREDICTION.seconds(LENGTHS)
    step = logged() | {"time/sync_s": prediction["sync"] + 0.0045 * prediction[STEP]}
    assert rung([step] * (2 * WINDOW)) == []
    slow = logged() | {"time/sync_s": prediction["sync"] + 0.0055 * prediction[STEP]}
    assert [line.split()[0] for line in rung([slow] * (2 * WINDOW))] == ["sync"]


def test_no_alarm_without_a_prediction() -> None:
    assert rung([logged({"trainer": 9.0})] * (3 * WINDOW), None) == []


def test_alarm_repeats_only_after_it_has_cleared() -> None:
    slow, well = [logged({"trainer": 2.0})] * (2 * WINDOW), [logged()] * WINDOW
    trainer = [line for line in rung([logged(), *slow, *well, *slow]) if "trainer" in line[:7]]
    assert len(trainer) == 2


@pytest.mark.parametrize("cut", [0, 1, 7, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_a_resumed_run_raises_the_same_alarms_about_predictions(cut: int) -> None:
    steps = [logged()] * 5 + [logged({"rollout": 1.5})] * (2 * WINDOW) + [logged()] * WINDOW
    steps += [{**logged({"trainer": 2.0}), "rollout/length_mean": float("nan")}] * (WINDOW + 3)
    first, second = Alarms(prediction=PREDICTION), Alarms(prediction=PREDICTION)
    said = [line for step in steps[:cut] for line in first.observe(step)]
    second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
    said += [line for step in steps[cut:] for line in second.observe(step)] + second.observe_end()
    assert said == rung(steps) and len(said) >= 2


def test_steps_of_another_machine_do_not_count_after_a_resume() -> None:
    """The run moves to a new machine after step 7, whose first step is 8."""
    first = Alarms(prediction=PREDICTION)
    for _ in range(7):
        first.observe(logged({"trainer": 5.0}))
    second = Alarms(prediction=replace(PREDICTION, first_step=8))
    second.load(first.state())
    assert [line for _ in range(2 * WINDOW) for line in second.observe(logged())] == []


Build = Callable[[str, int], Path]


def write_run(folder: Path, steps: list[dict[str, float]], record: Mapping[str, object]) -> None:
    (folder / FILE).write_text(json.dumps(record))
    (folder / "metrics.jsonl").unlink()
    logger = JsonlLogger(folder / "metrics.jsonl")
    for number, step in enumerate(steps, 1):
        logger.log(number, step)
    logger.close()


def test_report_shows_predicted_measured_and_ratio(
    build_run: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_run("predicted", 1)
    steps = [logged({"trainer": 40.0})] + [logged({"trainer": f}) for f in (1.9, 1.5, 1.2)]
    write_run(folder, steps, PREDICTION.record())
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"peak_memory_bytes": 30 * 10**9}))
    seconds = PREDICTION.seconds(LENGTHS)
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().err
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["phase"] == ["predicted", "measured", "ratio"]
    assert rows["trainer"][4:] == ["1.50", "!"]
    assert float(rows["trainer"][0]) == pytest.approx(seconds["trainer"], rel=0.005)
    assert float(rows["trainer"][2]) == pytest.approx(1.5 * seconds["trainer"], rel=0.005)
    assert rows["rollout"][4:] == ["1.00"]
    step = 1 + 0.5 * seconds["trainer"] / seconds[STEP]
    assert float(rows["step"][4]) == pytest.approx(step, abs=0.006)
    assert rows["memory"] == ["40", "GB", "30", "GB", "0.75"]
    assert "8 x H100, by its data sheet" in text and "steps 2 to 4" in text
    assert "prompts of 100 tokens, completions of 300, the longest 900" in text
    page = (folder / "report.html").read_text()
    assert '<b class="dot-bad">1.50 !</b>' in page and '<td class="n">0.75</td>' in page
    assert "Predicted and measured" in page


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"missing": "the speed of <this> CPU is not known"}, "speed of &lt;this&gt; CPU"),
        (None, "Measure its machine before the next run: sixfold plan --measure"),
        ({"seconds": {}}, "Measure its machine"),
    ],
)
def test_a_run_without_a_prediction_says_so_in_one_line(
    build_run: Build, record: Mapping[str, object] | None, said: str
) -> None:
    folder = build_run("unknown", 3)
    if record is not None:
        (folder / FILE).write_text(json.dumps(record))
    run = read_run(folder)
    view = prediction_view(run)
    assert view is not None and prediction_text(view).count("\n") == 0
    assert prediction_text(view).startswith("No prediction: ")
    assert said in write_report(folder).read_text()
    damaged = record is not None and "seconds" in record
    assert any(problem.startswith(f"{FILE}: ") for problem in run.problems) == damaged


def test_one_step_alone_has_nothing_to_compare(build_run: Build) -> None:
    folder = build_run("short", 1)
    write_run(folder, [logged()], PREDICTION.record())
    view = prediction_view(read_run(folder, dumps=False))
    assert view is not None and view.rows == [] and "first step does not count" in view.remark
