"""`trace.json`: a timeline in the Chrome Trace Event Format, which ui.perfetto.dev opens.

Every track is a process of the trace. Spans of a track that overlap are in different threads of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.durable import write_text_atomic
from ..timeline import Span

_FIRST = ("steps", "trainer", "groups", "environment")


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write spans as one trace file.

    Raises:
        UserError: if the disk refuses the file.
    """
    events = {"displayTimeUnit": "ms", "traceEvents": trace_events(spans)}
    write_text_atomic(path, json.dumps(events))


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Complete events ("X") of the spans, and the names of their tracks ("M").

    Times are microseconds since the earliest start. A span gets the first thread of its track that
    is free at its start.
    """
    origin = min((span.began for span in spans), default=0.0)
    tracks = sorted({span.track for span in spans}, key=_order)
    pids = {track: pid for pid, track in enumerate(tracks, 1)}
    free: dict[str, list[float]] = {track: [] for track in tracks}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": given}
        for track, pid in pids.items()
        for name, given in (
            ("process_name", {"name": track}),
            ("process_sort_index", {"sort_index": pid}),
        )
    ]
    for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
        ends = free[span.track]
        thread = next((i for i, end in enumerate(ends) if end <= span.began), len(ends))
        ends[thread : thread + 1] = [span.ended]
        given = {} if span.tokens is None else {"args": {"tokens": span.tokens}}
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "ts": (span.began - origin) * 1e6,
                "dur": (span.ended - span.began) * 1e6,
                "pid": pids[span.track],
                "tid": thread + 1,
                **given,
            }
        )
    return events + [
        {"ph": "M", "name": "thread_name", "pid": pids[track], "tid": i, "args": {"name": track}}
        for track, ends in free.items()
        for i in range(1, len(ends) + 1)
    ]


def _order(track: str) -> tuple[int, int, str]:
    place = _FIRST.index(track) if track in _FIRST else len(_FIRST)
    return place, len(track), track  # so that "sampler 10" follows "sampler 9"
