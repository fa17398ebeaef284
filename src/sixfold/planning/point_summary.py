"""Compare predictions with published values, quantity by quantity, and summarise the errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .constants import Constants
from .point_inputs import NotPredictable
from .point_rules import predict
from .points import Point

SPEED = ("step_s", "tokens_s_gpu", "tokens_s_total", "tflops_gpu", "mfu_pct", "gpu_hours")
"""Columns that say how fast a row is, each from the same predicted time. The first one counts."""

PHASES = ("train_s", "gen_s", "logprob_s", "ref_s", "sync_s")
SCALE_FREE = {"n_gpus", "micro_batch"}
"""Inputs of training rows that hardly change the tokens per second and device."""

NO_NUMBER = "the published value is text, not a number"
NO_COLUMN = "no rule predicts this column of such a row"


@dataclass(frozen=True)
class Outcome:
    """One published value and its prediction.

    Attributes:
        point: the row.
        quantity: column of the value; "" for a row with neither a number nor a prediction.
        published: the value; NaN if there is none, or if it is not a number.
        predicted: None if it is not predictable.
        leads: it is the row's first speed, or its first phase if the row has no speed.
        assumed: input columns that a rule has filled.
        reason: why it is not predictable.
    """

    point: Point
    quantity: str
    published: float
    predicted: float | None
    leads: bool = False
    assumed: tuple[str, ...] = ()
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error: predicted / published - 1. None if either number is missing."""
        if self.predicted is None or math.isnan(self.published):
            return None
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of a group of outcomes.

    Attributes:
        name: what the group holds.
        count: number of predicted values.
        median: their median.
        p90: the smallest error that at least 90 % of them do not exceed.
    """

    name: str
    count: int
    median: float
    p90: float


def outcomes(points: Iterable[Point], k: Constants) -> list[Outcome]:
    """Every published value of every row.

    A row without published values gives all quantities that are predicted for it, or the reason why
    there are none.
    """
    return [outcome for point in points for outcome in _row(point, k)]


def _row(point: Point, k: Constants) -> list[Outcome]:
    try:
        prediction = predict(point, k)
    except NotPredictable as problem:
        values = _published(point) or {"": math.nan}
        return [Outcome(point, name, x, None, reason=str(problem)) for name, x in values.items()]
    order = [name for name in (*SPEED, *PHASES) if name in point.published]
    lead = next((name for name in order if name in prediction.values), "")
    assumed = tuple(name for name in prediction.assumed if name not in SCALE_FREE)
    values = _published(point) or dict.fromkeys(prediction.values, math.nan)
    return [
        Outcome(point, name, value, None, reason=NO_NUMBER)
        if name in point.wordy
        else Outcome(
            point,
            name,
            value,
            prediction.values.get(name),
            name == lead,
            assumed,
            "" if name in prediction.values else prediction.refused.get(name, NO_COLUMN),
        )
        for name, value in values.items()
    ]


def _published(point: Point) -> dict[str, float]:
    """Published values of a row; NaN for text."""
    return point.published | dict.fromkeys(point.wordy, math.nan)


def errors(name: str, chosen: Iterable[Outcome]) -> Errors:
    """Median and 90th percentile (nearest rank); NaN for an empty group."""
    found = sorted(abs(o.error) for o in chosen if o.error is not None)
    if not found:
        return Errors(name, 0, math.nan, math.nan)
    half = len(found) // 2
    median = (found[half] + found[-half - 1]) / 2
    return Errors(name, len(found), median, found[math.ceil(0.9 * len(found)) - 1])


def summary(all_outcomes: Sequence[Outcome]) -> list[Errors]:
    """Errors of one value per row, of rows with and without assumed inputs, and by kind."""
    leads = [o for o in all_outcomes if o.leads]
    return [
        errors("one value per row", leads),
        errors("  all inputs published", (o for o in leads if not o.assumed)),
        errors("  some inputs assumed", (o for o in leads if o.assumed)),
        errors("  step time or throughput", (o for o in leads if o.quantity in SPEED)),
        errors("  phases and syncs only", (o for o in leads if o.quantity in PHASES)),
        errors("phases of steps", (o for o in all_outcomes if o.quantity in PHASES)),
        errors("memory", (o for o in all_outcomes if o.quantity == "mem_gib_gpu")),
        errors("every value", all_outcomes),
    ]
