"""Tables of `sixfold replay`: numbers of a recorded step beside the same numbers recomputed.

Two numbers agree if they differ by at most 1e-6 + 1e-5 times the larger one. With the machine and
the number of threads of the run, they are equal. Another CPU, or another number of threads or
ranks, adds the floats of a sum in another order, which changes the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .metric import Value
from .untrusted import one_line

ABSOLUTE, RELATIVE = 1e-6, 1e-5
"""Tolerance of the comparison: an absolute part, and a share of the larger number."""

SHOWN = 20
"""Maximum number of trajectories that are listed one by one."""

Verdict = Literal["equal", "rounding", "DIFFERS", "not recorded"]

Number = float | None
"""A number. None: a failed check, or a value that is not finite."""


@dataclass(frozen=True)
class Line:
    """One number of a step.

    Attributes:
        difference: largest absolute difference. None if one side has no number.
    """

    what: str
    recorded: Number
    recomputed: Number
    difference: Number
    verdict: Verdict


@dataclass(frozen=True)
class Sample:
    """A trajectory whose reward, advantage or episode differs.

    Attributes:
        sample: index of the sample, or "greedy".
        what: what differs: "reward", "advantage", or a description of how the episode differs.
        note: parts of the reward that differ, or an error.
    """

    task_id: str
    sample: str
    what: str
    recorded: Number
    recomputed: Number
    note: str = ""


def verdict_of(recorded: Number, recomputed: Number) -> Verdict:
    """Compare two numbers. A NaN counts as no number, as in metrics.jsonl."""
    a, b = _finite_or_none(recorded), _finite_or_none(recomputed)
    if a is None or b is None:
        return "equal" if a is b else "DIFFERS"
    if a == b:
        return "equal"
    close = abs(a - b) <= ABSOLUTE + RELATIVE * max(abs(a), abs(b))
    return "rounding" if close else "DIFFERS"


def compare_columns(what: str, recorded: Sequence[Number], recomputed: Sequence[Number]) -> Line:
    """Compare a number of each trajectory. The line has the means and the largest difference.

    Args:
        recorded: values in the record, one per trajectory.
        recomputed: values computed now, in the same order.
    """
    pairs = list(zip(recorded, recomputed, strict=True))
    verdicts = [verdict_of(a, b) for a, b in pairs]
    worst: Verdict = "equal"
    if "DIFFERS" in verdicts:
        worst = "DIFFERS"
    elif "rounding" in verdicts:
        worst = "rounding"
    gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    name = f"{what} (mean of {len(pairs)})"
    return Line(name, _mean(recorded), _mean(recomputed), max(gaps, default=None), worst)


def compare_metrics(
    recorded: Mapping[str, Value], recomputed: Mapping[str, Value], keys: Sequence[str]
) -> list[Line]:
    """Compare metrics, one line each. For a list of numbers the line has the largest difference.

    Args:
        keys: metrics to compare. They must be in `recomputed`.
    """
    lines = []
    for key in keys:
        new, old = recomputed[key], recorded.get(key)
        if key not in recorded:
            value = None if isinstance(new, Sequence) else _finite_or_none(new)
            lines.append(Line(key, None, value, None, "not recorded"))
        elif isinstance(new, Sequence) and isinstance(old, Sequence):
            same_length = len(new) == len(old)
            line = compare_columns(key, [*old], [*new] if same_length else [None] * len(old))
            lines.append(line)
        elif not isinstance(new, Sequence) and not isinstance(old, Sequence):
            a, b = _finite_or_none(old), _finite_or_none(new)
            gap = abs(a - b) if a is not None and b is not None else None
            lines.append(Line(key, a, b, gap, verdict_of(a, b)))
    return lines


def table(lines: Sequence[Line]) -> str:
    """Format lines as a text table with a header."""
    head = ("", "recorded", "recomputed", "difference", "verdict")
    rows = [
        (
            line.what,
            _text(line.recorded),
            _text(line.recomputed),
            "-" if line.difference is None else f"{line.difference:.3g}",
            line.verdict,
        )
        for line in lines
    ]
    return _columns([head, *rows])


def sample_table(samples: Sequence[Sample]) -> str:
    """Format trajectories as a text table with a header. At most SHOWN are listed."""
    head = ("task", "sample", "differs", "recorded", "recomputed", "")
    rows = [
        (
            one_line(sample.task_id, 40),
            sample.sample,
            sample.what,
            _text(sample.recorded),
            _text(sample.recomputed),
            one_line(sample.note, 90),
        )
        for sample in samples[:SHOWN]
    ]
    text = _columns([head, *rows])
    more = len(samples) - SHOWN
    return f"{text}\n... and {more} more" if more > 0 else text


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _finite_or_none(value: Number) -> Number:
    """The value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[Number]) -> Number:
    """Mean of the known values. None if no value is known."""
    known = [value for value in map(_finite_or_none, values) if value is not None]
    return sum(known) / len(known) if known else None


def _text(value: Number) -> str:
    return "-" if value is None else f"{value:.9g}"
