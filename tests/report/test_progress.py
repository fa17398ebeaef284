"""The display: what a pipe gets, that a terminal is given back, and that model text stays text."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from sixfold.report import progress
from sixfold.report.progress import Progress, sparkline
from sixfold.report.samples import Sample

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]hi[/] [link=file:///etc]x[/link] \u202etxt\x9b31m"


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        # Not `time.monotonic` itself: an event loop of another test reads it, and would then wait
        # for hours.
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


def pipe(width: int = 60) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width), stream


def terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return (
        Console(file=stream, width=100, force_terminal=True, _environ={"TERM": "xterm-256color"}),
        stream,
    )


def step(number: int, **more: float) -> dict[str, float]:
    return {"step": number, "reward/mean": 0.5, "reward/ema": 0.4, "rollout/tok_s": 12345.6, **more}


def test_a_pipe_gets_one_plain_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    console, stream = pipe()
    with Progress(console) as shown:
        shown.stage("RL", 3)
        for number in (1, 2, 3):
            clock.now += 10.0
            shown.update(
                step(number)
                | {
                    "time/total_s": 10.0,
                    "time/rollout_s": 7.5,
                    "mismatch/max_abs_logp": 2.1e-6,
                }
            )
    common = (
        "reward 0.400  (this step 0.500)  tokens/s 12 346  mismatch 2.1e-06"
        "  time: rollout 75% other 25%"
    )
    assert stream.getvalue().splitlines() == [
        f"RL 1/3  {common}  0:20 left",
        f"RL 2/3  {common}  0:10 left",
        f"RL 3/3  {common}",
    ]


@pytest.mark.parametrize("apart", [True, False])
def test_the_line_says_who_is_busy_if_roles_overlap(apart: bool) -> None:
    console, stream = pipe()
    busy = {"trainer_frac": 0.25, "environment_frac": 0.1, "sync_frac": 0.05}
    busy |= {"sampler_frac/0": 0.9, "sampler_frac/1": 0.7}
    with Progress(console) as shown:
        shown.stage("RL", 1)
        shares = {f"busy/{role}": share for role, share in busy.items()}
        shown.update(step(1, **shares, **({"sync/pause_s": 0.01} if apart else {})))
    expected = "busy trainer 25%, samplers 80%, environment 10%"
    assert (expected in stream.getvalue()) == apart


def test_fast_steps_are_thinned_but_evaluations_and_the_last_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    console, stream = pipe()
    with Progress(console) as shown:
        shown.stage("RL", 20)
        for number in range(1, 21):
            clock.now += 1.0
            evaluated = (
                {"heldout/accuracy": 0.75, "heldout/low": 0.7, "heldout/high": 0.8}
                if number == 9
                else {}
            )
            shown.update(step(number, **evaluated))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        "1/20",
        "6/20",
        "9/20",
        "14/20",
        "19/20",
        "20/20",
    ]
    assert "held-out" not in lines[1] and "held-out 75.0% (70.0% to 80.0%)  " in lines[2]
    assert all("held-out 75.0% (70.0% to 80.0%) at step 9  " in line for line in lines[3:])


def test_a_resumed_stage_does_not_count_steps_it_did_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    console, stream = pipe()
    with Progress(console) as shown:
        shown.stage("RL", 100)
        clock.now += 2.0
        shown.update(step(91))
    assert "0:18 left" in stream.getvalue()


def test_an_unfinished_stage_ends_with_the_step_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    console, stream = pipe()
    monkeypatch.setattr("sixfold.report.progress.EVERY_S", 100.0)
    with Progress(console) as shown:
        shown.stage("SFT", 10)
        for number in (1, 2):
            clock.now += 1.0
            shown.update({"step": number, "train/loss": 1.0 / number})
        shown.stage("RL", 5)
    assert [line.split("  ")[:2] for line in stream.getvalue().splitlines()] == [
        ["SFT 1/10", "loss 1.0000"],
        ["SFT 2/10", "loss 0.5000"],
    ]


def test_the_panel_shows_the_state() -> None:
    console, _ = terminal()
    shown = Progress(console)
    shown.stage("RL", 50)
    for number in (1, 2, 3):
        shown.update(
            step(number)
            | {
                "reward/ema": number / 10,
                "time/total_s": 2.0,
                "time/rollout_s": 1.0,
                "time/trainer_s": 1.0,
            }
        )
    plain, stream = pipe()
    plain.print(shown._panel(), width=90)
    text = stream.getvalue()
    for expected in ("RL", "3 of 50", "0.300", "▁▅█", "12 346", "rollout 50%", "trainer 50%"):
        assert expected in text


def test_exception_restores_the_terminal() -> None:
    console, stream = terminal()
    with pytest.raises(RuntimeError), Progress(console) as shown:
        shown.stage("RL", 5)
        shown.update(step(1))
        raise RuntimeError
    out = stream.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is hidden"
    assert not shown._live.is_started
    assert "RL 1/5" in out


@pytest.mark.parametrize("place", ["note", "sample", "figure", "stage"])
def test_model_text_cannot_drive_the_terminal(place: str) -> None:
    console, stream = pipe(width=400)
    with Progress(console) as shown:
        if place == "note":
            shown.note(HOSTILE)
        elif place == "sample":
            shown.samples(
                [Sample(HOSTILE, HOSTILE, HOSTILE, 0.0)], [Sample(HOSTILE, HOSTILE, HOSTILE, None)]
            )
        elif place == "figure":
            shown.before_after("RL", [(HOSTILE, HOSTILE, HOSTILE)])
        else:
            shown.stage(HOSTILE, 1)
            shown.update(step(1))
    out = stream.getvalue()
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(out)
    assert "[bold red]hi[/] [link=file:///etc]x[/link]" in out, "markup was read, not shown"
    assert "⟨U+202E⟩txt" in out


def test_samples_are_paired_by_prompt() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=120)) as shown:
        shown.samples(
            [Sample("1+1=", "2", "three", 0.0), Sample("2+2=", "4", "four?", None)],
            [Sample("1+1=", "2", "two", 1.0), Sample("3+3=", "6", "60", 0.9, False)],
        )
    rows = [line.split("│") for line in stream.getvalue().splitlines() if "+" in line]
    assert [[cell.strip() for cell in row[1:5]] for row in rows] == [
        ["1+1=", "2", "✗ three", "✓ two"],
        ["3+3=", "6", "—", "~ 60"],
        ["2+2=", "4", "· four?", "—"],
    ]


def test_sparkline() -> None:
    assert sparkline([0.0, 1.0, 0.5, math.nan, 0.25]) == "▁█▅ ▃"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_time_left_ends_at_the_time_limit_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    console, stream = pipe(200)
    with Progress(console) as shown:
        shown.stage("RL", 100, 45.0)
        for number in (1, 2):
            clock.now += 10.0
            shown.update(step(number))
    assert "0:35 left" in stream.getvalue() and "0:25 left" in stream.getvalue()
    assert "16:" not in stream.getvalue()


def test_tables_of_results_go_to_standard_output_and_lines_of_progress_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress() as shown:
        shown.stage("RL", 1)
        shown.update(step(1))
        shown.before_after("RL", [("solved", "10 %", "90 %")])
        shown.samples([], [Sample("2+3=", "5", "5", 1.0, True)])
        shown.note("finished")
    said = capsys.readouterr()
    assert "90 %" in said.out and "2+3=" in said.out
    assert "RL 1/1" in said.err and "finished" in said.err
    assert "90 %" not in said.err and "RL" not in said.out.replace(
        "before and after RL", ""
    ).replace("Before and after RL", "")


def test_the_marks_of_samples_are_explained_where_they_stand() -> None:
    console, stream = pipe()
    sample = Sample("1+1=", "2", "3", 0.5, False)
    with Progress(console) as shown:
        shown.samples([sample], [sample])
    text = stream.getvalue()
    assert "~ 3" in text and "~ partly right" in " ".join(text.split())
