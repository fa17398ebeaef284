"""Topologies and their timelines against L19 and L22c."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.planning.course_values import STEPS_PER_HOUR, TOPOLOGY_STEPS

from sixfold.pages.lab import Timeline
from sixfold_labs.catalogue import find


@pytest.mark.parametrize(("phases", "hourly", "ratio"), STEPS_PER_HOUR)
def test_steps_per_hour(
    phases: tuple[float, float, float], hourly: tuple[float, ...], ratio: float
) -> None:
    rollout, train, sync = phases
    outcome = find("topology")(rollout=rollout, train=train, sync=sync)
    names = ("colocated", "disaggregated", "async")
    measured = [outcome.number(f"steps_per_hour_{name}") for name in names]
    assert measured == pytest.approx(hourly, abs=0.5)
    assert outcome.number("async_speedup") == pytest.approx(ratio)


@pytest.mark.parametrize(("topology", "seconds", "throughput", "idle"), TOPOLOGY_STEPS)
def test_step_and_idle_time(topology: str, seconds: float, throughput: float, idle: float) -> None:
    outcome = find("async-timeline")(topology=topology)
    assert outcome.number("step_seconds") == seconds
    assert outcome.number("relative_throughput") == pytest.approx(throughput, abs=0.005)
    assert outcome.number("idle_share") == pytest.approx(idle, abs=0.005)
    assert outcome.number("idle_band_seconds") == abs(20 - 8) + 3


@pytest.mark.parametrize(
    ("staleness", "percent", "verdict"),
    [
        (0, 0, "healthy"),
        (2, 10, "usable"),
        (6, 26, "broken"),
        (8, 33, "broken"),
        (12, 45, "broken"),
    ],
)
def test_clip_fraction_of_async(staleness: int, percent: float, verdict: str) -> None:
    outcome = find("async-timeline")(staleness=staleness)
    assert 100 * outcome.number("clip_fraction") == pytest.approx(percent, abs=0.5)
    assert outcome.values["clip_verdict"] == verdict


@pytest.mark.parametrize("topology", ["colocated", "disaggregated"])
def test_synchronous_topologies_have_no_stale_samples(topology: str) -> None:
    assert find("async-timeline")(topology=topology, staleness=12).values["clip_fraction"] == 0


@pytest.mark.parametrize("topology", ["colocated", "disaggregated", "async"])
@pytest.mark.parametrize(("rollout", "train"), [(20.0, 8.0), (6.0, 19.0)])
def test_timeline_keeps_its_step_time_and_rows_do_not_overlap(
    topology: str, rollout: float, train: float
) -> None:
    outcome = find("async-timeline")(topology=topology, rollout=rollout, train=train)
    chart = outcome.figures[0]
    assert isinstance(chart, Timeline)
    starts = [span.start for span in chart.spans if span.kind == "rollout"]
    gaps = [after - before for before, after in pairwise(starts)]
    assert gaps == pytest.approx([outcome.number("step_seconds")] * 3)
    for row in {span.row for span in chart.spans}:
        spans = sorted((s.start, s.end) for s in chart.spans if s.row == row)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    for kind, seconds in (("rollout", rollout), ("train", train), ("sync", 3.0)):
        durations = [s.end - s.start for s in chart.spans if s.kind == kind]
        assert durations == pytest.approx([seconds] * len(durations))


def test_disaggregated_pools_wait_for_the_sync() -> None:
    chart = find("async-timeline")(topology="disaggregated").figures[0]
    assert isinstance(chart, Timeline)
    for sync in (span for span in chart.spans if span.kind == "sync"):
        busy = [span for span in chart.spans if span.kind != "sync"]
        assert not any(s.start < sync.end - 1e-9 and sync.start < s.end - 1e-9 for s in busy)


def test_clipping_of_a_trained_policy_crosses_the_limit_between_4_and_8_versions() -> None:
    lab = find("async-timeline")
    outcomes = [lab(staleness=stale, source="library") for stale in (0, 2, 4, 8)]
    shares = [outcome.number("clip_fraction") for outcome in outcomes]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[1] < 0.05
    assert shares[2] < 0.25 <= shares[3]
    for outcome in outcomes:
        assert outcome.number("removed_gradients") <= outcome.number("clip_fraction")
