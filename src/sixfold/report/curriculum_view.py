"""The report's view of the data: its faults, the curriculum's buckets, and the tasks that moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .data_faults import Diagnosis, diagnose
from .numbers import percent
from .run_record import RunRecord

MOVES = 40
"""Maximum number of moves that are shown, the newest first."""
RATES = 8
"""Maximum number of pass rates that are shown of a task, the newest last."""


@dataclass(frozen=True)
class Move:
    """A task that changed its bucket.

    Attributes:
        step: step after which it moved.
        change: the buckets, such as "train to easy".
        rate: its pass rate then, which gives old samples less weight.
        history: samples solved since each decision, such as "step 10: 3 of 8".
    """

    step: int
    task: str
    change: str
    rate: str
    history: str


@dataclass(frozen=True)
class DataView:
    """Data of a run.

    Attributes:
        faults: six symptoms, with the evidence for each.
        moves: newest moves of the curriculum. Empty without one.
        moved: number of all moves.
    """

    faults: Sequence[Diagnosis]
    moves: Sequence[Move]
    moved: int


def data_view(run: RunRecord) -> DataView | None:
    """The data of a run. None if no step was recorded."""
    if not run.metrics:
        return None
    moves = [(line["step"], *move) for line in run.curriculum for move in line["moved"]]
    rates = _histories(run.curriculum, {move[1] for move in moves[-MOVES:]})
    shown = [
        Move(step, task, f"{before} to {after}", percent(rate), "; ".join(rates[task][-RATES:]))
        for step, task, before, after, rate in reversed(moves[-MOVES:])
    ]
    return DataView(diagnose(run.metrics), shown, len(moves))


def _histories(lines: Sequence[Mapping[str, Any]], tasks: set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {task: [] for task in tasks}
    for line in lines:
        for task in tasks & line["seen"].keys():
            solved, samples = line["seen"][task]
            found[task].append(f"step {line['step']}: {solved} of {samples}")
    return found
