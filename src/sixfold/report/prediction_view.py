"""The report's table of predicted and measured durations, for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .numbers import number, percent
from .predicted import LIMIT, Comparison, Phase, compare, lengths_text, step_figures
from .prediction import Prediction
from .run_record import RunRecord
from .untrusted import one_line

UNKNOWN = "the run made none. Measure its machine before the next run: sixfold plan --measure"
_NONE = "—"


@dataclass(frozen=True)
class Row:
    """A phase, or memory, in words. `deviates` marks an alarm."""

    name: str
    predicted: str
    measured: str
    ratio: str
    deviates: bool


@dataclass(frozen=True)
class PredictionView:
    """Table of predicted and measured durations, and what they are.

    The table is empty if nothing was predicted. The remark then says how to get a prediction.
    """

    rows: Sequence[Row]
    remark: str


def prediction_view(run: RunRecord) -> PredictionView | None:
    """Predicted and measured durations of a run. None if the run has no step yet."""
    if not run.metrics:
        return None
    prediction = run.prediction
    if prediction is None or isinstance(prediction, str):
        return PredictionView([], f"No prediction: {one_line(prediction or UNKNOWN, 300)}")
    records = [record for record in run.metrics if int(record["step"]) > prediction.first_step]
    if not records:
        return PredictionView([], "Nothing to compare: the first step does not count.")
    found = compare(prediction, [step_figures(record) for record in records])
    rows = [_row(phase) for phase in found.phases]
    measured = run.summary.get("peak_memory_bytes")
    if prediction.memory_bytes is not None:
        rows.append(_memory(prediction.memory_bytes, measured))
    steps = (int(records[0]["step"]), int(records[-1]["step"]))
    return PredictionView(rows, _remark(prediction, found, steps))


def prediction_text(view: PredictionView) -> str:
    """The table as lines of text, with the remark below."""
    table = [("phase", "predicted", "measured", "ratio")]
    table += [(row.name, row.predicted, row.measured, _ratio_text(row)) for row in view.rows]
    lines = [f"{name:<12}{was:>12}{now:>12}{ratio:>9}" for name, was, now, ratio in table]
    return "\n".join([*(lines if view.rows else ()), view.remark])


def _ratio_text(row: Row) -> str:
    return f"{row.ratio} !" if row.deviates else f"{row.ratio}  "


def _row(phase: Phase) -> Row:
    known = math.isfinite(phase.measured)
    return Row(
        phase.name,
        f"{number(phase.predicted)} s",
        f"{number(phase.measured)} s" if known else _NONE,
        f"{phase.ratio:.2f}" if known and phase.ratio is not None else _NONE,
        phase.deviates,
    )


def _memory(predicted: int, measured: object) -> Row:
    """Peak memory of one GPU. It raises no alarm."""
    shown = f"{number(predicted / 1e9)} GB"
    if not isinstance(measured, int):
        return Row("memory", shown, _NONE, _NONE, False)
    return Row(
        "memory", shown, f"{number(measured / 1e9)} GB", f"{measured / predicted:.2f}", False
    )


def _remark(prediction: Prediction, found: Comparison, steps: tuple[int, int]) -> str:
    """Where the prediction comes from, and what was measured."""
    said = [
        f"Predicted for {one_line(prediction.devices, 160)}, {lengths_text(found)}.",
        f"Measured: median of steps {steps[0]} to {steps[1]}, without logging and evaluation.",
    ]
    if any(phase.deviates for phase in found.phases):
        said.append(f"! marks a deviation of more than {percent(LIMIT, 0)}.")
    return " ".join(said)
