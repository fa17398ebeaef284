"""Busy seconds against sampled time, and the steps that a timeline keeps."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from sixfold import timeline
from sixfold.timeline import Busy, Timeline


class Clock:
    """A clock that stands still between calls of `set`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_busy_seconds_are_those_of_the_union(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time: the number of whole seconds in which at least one interval is open."""
    clock, draw = Clock(monkeypatch), random.Random(0)
    for _ in range(50):
        intervals = [(a, a + draw.randint(1, 9)) for a in draw.sample(range(40), 6)]
        busy, start = Busy(), clock.now
        for second in range(50):
            clock.now = start + second
            for began, ended in intervals:
                if ended == second:
                    busy.__exit__()
                if began == second:
                    busy.__enter__()
            union = sum(any(a <= s < b for a, b in intervals) for s in range(second))
            assert busy.seconds(clock.now) == union, (intervals, second)
        clock.now += 100


def test_a_failed_call_is_busy_until_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept = Clock(monkeypatch), Timeline()
    with pytest.raises(ValueError, match="check"), kept.checking("a"):
        clock.now = 3.0
        raise ValueError("check")
    clock.now = 9.0
    assert kept.environment.seconds(9.0) == 3.0


def test_the_newest_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that ended in a kept step stay, also if they began before it."""
    clock, kept = Clock(monkeypatch), Timeline(2)
    kept.add("groups", "before the first step", 0.0, 0.5)
    clock.now = 1.0
    kept.begin()
    kept.phase("rollout")
    for step in range(1, 5):
        clock.now = 10.0 * step
        kept.add("groups", f"ends in {step}", clock.now - 15, clock.now - 1)
        kept.end_step(step)
    names = [span.name for span in kept.spans if span.track == "groups"]
    assert names == ["ends in 3", "ends in 4"]
    steps = [(s.name, s.began, s.ended) for s in kept.spans if s.track == "steps"]
    assert steps == [("step 3", 20.0, 30.0), ("step 4", 30.0, 40.0)]
    phases = [(s.began, s.ended) for s in kept.spans if s.track == "trainer"]
    assert phases == [(20.0, 30.0), (30.0, 40.0)]


def test_nothing_is_kept_without_steps() -> None:
    kept = Timeline()
    kept.begin()
    kept.phase("rollout")
    with kept.checking("a"):
        kept.end_step(1)
    assert kept.spans == []
