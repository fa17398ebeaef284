"""What the roles did and when, in every topology: the figures against independent sources."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.backends.samplers import Samplers
from sixfold.recipe.toml import parse_recipe
from sixfold.report.html import write_report
from sixfold.report.loggers import read_metrics
from sixfold.report.rollouts import read_rollouts
from sixfold.rollout.generator import Activity
from sixfold.run import role_meter
from sixfold.run.role_meter import RoleMeter
from sixfold.run.start import train_run
from sixfold.timeline import Timeline
from sixfold.types import Task, Trajectory

from ..forked_programs import OF_A_RUN, fork_programs
from .processes import tiny_recipe

STEPS = 4
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "local": {},
    "processes": dict(placement__kind="processes", placement__samplers=2),
    "ahead": dict(rollout__staleness=1),
    "both": dict(rollout__staleness=1, placement__kind="processes", placement__samplers=2),
}


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in, so every step has an update."""
    return len(completion) / 12


def run(folder: Path, name: str, replayed: Path | None = None, **more: Any) -> Path:
    flags = tiny_recipe(folder, run__steps=STEPS, sft__steps=0, **more)
    recipe = parse_recipe(f"run.name = '{name}'", "test", flags)
    assert train_run(recipe, reward=length, replayed=replayed) == 0
    return folder / name


def weights(folder: Path) -> list[bytes]:
    files = folder.glob(f"checkpoints/step-{STEPS:06d}/model/*.safetensors")
    return [file.read_bytes() for file in sorted(files)]


@pytest.fixture(scope="module", params=TOPOLOGIES)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trace holds all its steps."""
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch, targets=OF_A_RUN)
        folder = tmp_path_factory.mktemp(request.param)
        return run(folder, request.param, log__trace_steps=STEPS, **TOPOLOGIES[request.param])


def events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each track, in the order of their starts, with their end."""
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    tracks = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {track: [] for track in tracks.values()}
    for e in sorted((e for e in trace if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[tracks[e["pid"]]].append({**e, "end": e["ts"] + e["dur"]})
    return found


def replies(folder: Path) -> list[dict[str, Any]]:
    tracks = events(folder)
    every = [e for track, own in tracks.items() if track.startswith("sampler") for e in own]
    return [e for e in every if "tokens" in e.get("args", {})]


@pytest.mark.mostly_nightly(1)
def test_a_trace_changes_no_bit(traced: Path, tmp_path: Path) -> None:
    """The weights are those without a trace: of a local run, or of a replay of the run ahead."""
    ahead = traced.name in ("ahead", "both")
    replayed = dict(replayed=traced / "schedule.jsonl", **TOPOLOGIES[traced.name]) if ahead else {}
    plain = run(tmp_path, "plain", **replayed)
    assert weights(plain) == weights(traced)
    assert not (plain / "trace.json").exists()


def test_every_trained_trajectory_is_in_the_trace(traced: Path) -> None:
    """With the number of its tokens. Runs ahead also have those of groups that are not trained."""
    files = sorted(traced.glob("rollouts/*"))
    rows = [row for file in files for row in read_rollouts(file)]
    trained = Counter(
        (f"{row['task_id']} #{row['sample']}", sum(p == "s" for p in row["provenance"]))
        for row in rows
    )
    sampled = Counter((e["name"], e["args"]["tokens"]) for e in replies(traced))
    assert len(rows) == 16 * STEPS
    assert not trained - sampled
    if traced.name in ("local", "processes"):
        assert trained == sampled


def test_the_trace_has_all_tracks(traced: Path) -> None:
    tracks, samplers = events(traced), 2 if traced.name in ("processes", "both") else 1
    named = {"steps", "trainer", "groups", "environment"}
    assert tracks.keys() == named | {f"sampler {n}" for n in range(samplers)}
    assert [e["name"] for e in tracks["steps"]] == [f"step {n}" for n in range(1, STEPS + 1)]
    of_tasks = [{e["name"].split(" #")[0] for e in tracks[f"sampler {n}"]} for n in range(samplers)]
    assert all(own - {"weight load"} for own in of_tasks)
    if samplers == 2:  # all samples of a task are in the process that has its prompt in its cache
        assert of_tasks[0] & of_tasks[1] == {"weight load"}
    phases = tracks["trainer"]
    assert all(a["end"] <= b["ts"] + 1 for a, b in pairwise(phases))
    for name in ("rollout", "trainer", "sync"):
        assert sum(e["name"] == name for e in phases) == STEPS, name
    loads = [
        [e["dur"] / 1e6 for e in own if e["name"] == "weight load"]
        for track, own in sorted(tracks.items())
        if track.startswith("sampler")
    ]
    pauses = [
        line["sync/pause_s"]
        for line in read_metrics(traced / "metrics.jsonl")
        if "sync/pause_s" in line
    ]
    longest = [max(of_step) for of_step in zip(*loads, strict=True)]
    assert len(pauses) == (0 if traced.name == "local" else STEPS)
    assert pauses == pytest.approx(longest, rel=1e-6)


def test_times_of_all_processes_are_of_one_clock(traced: Path) -> None:
    """A reply is sampled while its group is played."""
    groups = {(e["name"], e["end"]): e["ts"] for e in events(traced)["groups"]}
    for reply in replies(traced):
        task = reply["name"].rpartition(" #")[0]
        assert any(
            name == task and began <= reply["ts"] and reply["end"] <= end
            for (name, end), began in groups.items()
        ), reply


def test_shares_are_shares(traced: Path) -> None:
    for line in read_metrics(traced / "metrics.jsonl"):
        busy = {key: value for key, value in line.items() if key.startswith("busy/")}
        assert {"busy/trainer_frac", "busy/sync_frac", "busy/environment_frac"} < busy.keys()
        assert any(key.startswith("busy/sampler_frac/") for key in busy)
        assert all(0 <= share <= 1 + 1e-6 for share in busy.values()), busy


def test_ages_of_tokens_are_those_of_the_dumps(traced: Path) -> None:
    files, lines = sorted(traced.glob("rollouts/*")), read_metrics(traced / "metrics.jsonl")
    if "ahead" != traced.name != "both":
        assert not any("async/age_hist" in line for line in lines)
        return
    for trained, (file, line) in enumerate(zip(files, lines, strict=True)):
        ages: Counter[int] = Counter()  # one update per step, so step t trains version t - 1
        for row in map(Trajectory.from_record, read_rollouts(file)):
            ages.update(trained - v for v, m in zip(row.version, row.mask, strict=True) if m)
        assert line["async/age_hist"] == [ages[age] for age in range(max(ages) + 1)]


def test_the_report_shows_who_was_busy(traced: Path) -> None:
    page = write_report(traced).read_text()
    assert "Busy share of each role" in page
    assert ("Trained tokens by age" in page) == (traced.name in ("ahead", "both"))


def samplers(*activities: Activity | None) -> Samplers:
    made = object.__new__(Samplers)
    made.places = [SimpleNamespace(process=SimpleNamespace(activity=a)) for a in activities]  # type: ignore[misc]
    return made


def test_a_sampler_is_measured_between_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is replaced, that has not replied, and that said nothing new."""
    now = 100.0
    monkeypatch.setattr(role_meter, "time", SimpleNamespace(perf_counter=lambda: now))
    timed = {f"time/{r}_s": 1.0 for r in ("batch", "reference", "algorithm", "trainer", "sync")}
    before = samplers(Activity(0.0, 90.0, 20.0, 50), Activity(0.0, 95.0, 7.0, 9), None)
    kept = Timeline()
    meter = RoleMeter(before, kept)
    now = 116.0
    after = [
        Activity(0.0, 110.0, 25.0, 130, (108.0, 108.5)),  # 5 of 20 s, 80 tokens
        Activity(104.0, 112.0, 2.0, 4, (106.0, 108.0)),  # a new process: 2 of 8 s, 4 tokens
        None,
    ]
    before.places = samplers(*after).places
    assert meter.metrics({**timed}) == {
        "busy/trainer_frac": 4 / 16,
        "busy/sync_frac": 1 / 16,
        "busy/environment_frac": 0.0,
        "busy/sampler_frac/0": 5 / 20,
        "sampler/tok_s/0": 80 / 20,
        "busy/sampler_frac/1": 2 / 8,
        "sampler/tok_s/1": 4 / 8,
        "sync/pause_s": 2.0,
    }
    now = 124.0
    assert meter.metrics({**timed}).keys() == {
        f"busy/{role}_frac" for role in ("trainer", "sync", "environment")
    }
