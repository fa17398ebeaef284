"""`kill -9` at any moment, then --resume: the run ends as if nothing had happened. And the ways in
which a resume is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sixfold.checkpoint.checkpoint import load_checkpoint
from sixfold.checkpoint.listing import list_checkpoints, newest_checkpoint
from sixfold.report.rollouts import read_rollouts

from .processes import metrics, start, tiny_recipe

pytestmark = pytest.mark.slow

STEPS = 16


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(tiny_recipe(folder, run__name="whole", run__steps=STEPS), folder / "errors")
    process.join(120)
    assert process.exitcode == 0, (folder / "errors").read_text()
    return folder / "whole"


KILLS = {1: 4, 0: 1, 2: 7}
"""By seed, the step after which a run is killed."""


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("seed", KILLS)
def test_run_killed_at_a_step_equals_the_uninterrupted_run(tmp_path: Path, seed: int) -> None:
    """With seed 0, the process that recovers from a kill is also killed while it saves."""
    run, whole = tmp_path / "killed", tmp_path / "whole"
    flags = {
        name: tiny_recipe(tmp_path, run__name=name, run__steps=8, run__seed=seed, data__heldout=0)
        for name in ("killed", "whole")
    }
    process = start(flags["killed"], tmp_path / "errors")
    _wait_for_step(run, KILLS[seed])
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    for checkpoint in list_checkpoints(run / "checkpoints"):
        load_checkpoint(checkpoint)  # what is listed is never half-written
    for fault, code in (("checkpoint:9", 137), ("", 0)) if seed == 0 else (("", 0),):
        process = start(flags["killed"], tmp_path / "errors", run, fault)
        process.join(120)
        assert process.exitcode == code, (tmp_path / "errors").read_text()
    process = start(flags["whole"], tmp_path / "errors")
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    ours, theirs = (newest_checkpoint(r / "checkpoints")[0] for r in (run, whole))
    assert ours and theirs and ours.name == theirs.name == "step-000008"
    for file in ("model/model.safetensors", "trainer.safetensors"):
        mine, other = load_file(ours / file), load_file(theirs / file)
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].numpy().tobytes() == other[name].numpy().tobytes(), f"{file}: {name}"
    assert metrics(run) == metrics(whole)
    assert [m["step"] for m in metrics(run)] == list(range(1, 9))


@pytest.mark.nightly
def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on(
    tmp_path: Path, uninterrupted: Path
) -> None:
    whole = uninterrupted
    flags = tiny_recipe(tmp_path, run__name="stopped", run__steps=STEPS, checkpoint__every=0)
    run = tmp_path / "stopped"
    process = start(flags, tmp_path / "errors")
    _wait_for_step(run, 3)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    said = (tmp_path / "errors").read_text()
    assert process.exitcode == 130, said
    stopped_at = len(metrics(run))
    assert stopped_at < STEPS
    assert (
        newest_checkpoint(run / "checkpoints")[0] == run / "checkpoints" / f"step-{stopped_at:06d}"
    )
    assert f"stopped after step {stopped_at}; go on with: sixfold train --resume {run}" in said
    process = start(flags, tmp_path / "errors", resume=run)
    process.join(60)
    assert process.exitcode == 0
    assert metrics(run) == metrics(whole)


def test_a_finished_run_resumes_to_nothing(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "whole"
    shutil.copytree(uninterrupted, run)
    before = metrics(run)
    process = start(
        tiny_recipe(tmp_path, run__name="whole", run__steps=STEPS), tmp_path / "errors", resume=run
    )
    process.join(60)
    assert process.exitcode == 0 and metrics(run) == before


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "whole"
    shutil.copytree(uninterrupted, run)
    before = metrics(run)
    newest = list_checkpoints(run / "checkpoints")[-1] / "model" / "model.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-5] ^= 1
    newest.write_bytes(raw)
    process = start(
        tiny_recipe(tmp_path, run__name="whole", run__steps=STEPS), tmp_path / "errors", resume=run
    )
    process.join(60)
    said = (tmp_path / "errors").read_text()
    assert (
        process.exitcode == 0
        and "skipping a damaged checkpoint" in said
        and f"resuming {run} from step-{STEPS - 2:06d}" in said
    )
    kept = run / "checkpoints" / f"damaged-step-{STEPS:06d}" / "model" / "model.safetensors"
    assert kept.read_bytes() == bytes(raw) and f"damaged-step-{STEPS:06d}" in said
    assert metrics(run) == before


def test_the_run_folder_holds_what_it_should(uninterrupted: Path) -> None:
    run = uninterrupted
    summary = json.loads((run / "summary.json").read_text())
    low, high = summary["heldout_after_interval"]
    assert 0 <= low <= summary["heldout_after"] <= high <= 1
    assert summary["versions"]["torch"] and summary["seconds"] > 0
    records = read_rollouts(run / "rollouts" / "step-000001.jsonl.zst")
    assert len(records) == 16
    for record in records:
        assert (
            re.sub(r"<\|(end|pad)\|>", "", "".join(record["pieces"][record["prompt_length"] :]))
            == record["text"]
        )
        assert abs(sum(record["advantage"] for record in records)) < 1e-4
    assert (run / "report.html").read_text().startswith("<!")


def _wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len(
            (run / "metrics.jsonl").read_text().splitlines()
        ) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within 60 s")


@pytest.mark.nightly
@pytest.mark.parametrize("every", [2, 1])
def test_a_run_with_an_engine_of_its_own_resumes_exactly(tmp_path: Path, every: int) -> None:
    """With sync.every = 2 the engine's weights are older than the trainer's at every odd step: they
    must come back as they were.
    """
    settings = {"sync__kind": "copy", "sync__every": every, "checkpoint__every": 3}
    for name, parts in (("a", [7]), ("b", [3, 7])):
        for steps in parts:
            resume = tmp_path / name if steps != parts[0] else None
            process = start(
                tiny_recipe(tmp_path, run__name=name, run__steps=steps, **settings),
                tmp_path / "errors",
                resume=resume,
            )
            process.join(120)
            assert process.exitcode == 0, (tmp_path / "errors").read_text()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    staleness = [m["sync/staleness"] for m in metrics(tmp_path / "a")]
    assert max(staleness) == every - 1


def test_sigterm_during_the_warm_up_exits_143(tmp_path: Path) -> None:
    flags = tiny_recipe(tmp_path, run__name="early", run__steps=2, sft__steps=100000)
    process = start(flags, tmp_path / "errors")
    deadline = time.monotonic() + 60
    log = tmp_path / "early" / "sft.jsonl"
    while not (log.exists() and log.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143
    assert "stopped after SFT step" in (tmp_path / "errors").read_text()
    assert [path.name[:4] for path in (tmp_path / "early" / "checkpoints").iterdir()].count(
        "sft-"
    ) >= 1
