"""The trace file: every span once, at its time, and no two at once in a thread."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sixfold.report.trace import write_trace
from sixfold.timeline import Span

TRACKS = ["sampler 10", "sampler 2", "groups", "environment", "trainer", "steps"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Span], dict[str, Any]]:
    """Random spans that overlap, and the file of them."""
    draw, file = random.Random(0), tmp_path_factory.mktemp("trace") / "trace.json"
    spans = []
    for number in range(300):
        began = draw.randrange(100, 200) / 8
        name = f"span {number} </script>\n"
        spans.append(
            Span(draw.choice(TRACKS), name, began, began + draw.randint(1, 9) / 8, number or None)
        )
    write_trace(file, spans)
    return spans, json.loads(file.read_text())


def test_every_span_is_one_event(written: tuple[list[Span], dict[str, Any]]) -> None:
    spans, trace = written
    events = trace["traceEvents"]
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    first = min(span.began for span in spans)
    found = {
        (
            tracks[e["pid"]],
            e["name"],
            e["ts"] / 1e6 + first,
            (e["ts"] + e["dur"]) / 1e6 + first,
            e.get("args", {}).get("tokens"),
        )
        for e in events
        if e["ph"] == "X"
    }
    assert found == {(s.track, s.name, s.began, s.ended, s.tokens) for s in spans}
    assert sum(e["ph"] == "X" for e in events) == len(spans)


def test_spans_of_a_thread_do_not_overlap(written: tuple[list[Span], dict[str, Any]]) -> None:
    """And a track has as many threads as spans that are open at once."""
    spans, trace = written
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for (pid, tid), own in threads.items():
        own.sort()
        for (_, ended), (began, _) in pairwise(own):
            assert ended <= began, (pid, tid)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(threads)
    for pid, track in _tracks(trace).items():
        own_spans = [s for s in spans if s.track == track]
        most = max(sum(o.began <= s.began < o.ended for o in own_spans) for s in own_spans)
        assert sum(p == pid for p, _ in threads) == most, track


def _tracks(trace: dict[str, Any]) -> dict[int, str]:
    events = trace["traceEvents"]
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_tracks_are_in_order(written: tuple[list[Span], dict[str, Any]]) -> None:
    _, trace = written
    order = ["steps", "trainer", "groups", "environment", "sampler 2", "sampler 10"]
    assert [track for _, track in sorted(_tracks(trace).items())] == order


def test_an_empty_trace_can_be_written(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
