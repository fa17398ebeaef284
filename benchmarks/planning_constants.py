"""Fit the constants of the time model, and test them on rows outside of the fit.

    python benchmarks/planning_constants.py            # fit to all rows
    python benchmarks/planning_constants.py --folds 5  # fit to 4/5 of the rows, test on the rest
    python benchmarks/planning_constants.py --sources  # leave out one publisher at a time

The loss of a row is Huber's of the log error (quadratic up to 0.35, constant from 1). Rows with
assumed inputs weigh 0.3. The search moves one constant at a time by 30 %, 12 % and 5 %.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from sixfold_planning.constants import CONSTANTS, Constants
from sixfold_planning.page.points import Outcome, errors, outcomes, read_points
from sixfold_planning.published import Point

POINTS = Path(__file__).parents[1] / "tests" / "data" / "published_points.csv"
LARGEST_SHARE = 0.85
SHARES = ("tuned", "eager", "fp8", "ring", "bandwidth", "sync")
START = Constants(
    tuned=0.5,
    eager=0.4,
    fp8=0.9,
    ring=0.8,
    bandwidth=0.75,
    decode_layer_s=200e-6,
    layer_pass_s=2e-3,
    expert_loop_s=1e-3,
    switch_s=15.0,
    rl_micro_step_s=0.5,
    publish_gb_s=5.0,
    sync=0.5,
)


def leads(points: Sequence[Point], k: Constants) -> list[Outcome]:
    """The value of each row that counts."""
    return [outcome for outcome in outcomes(points, k) if outcome.leads]


def loss(points: Sequence[Point], k: Constants) -> float:
    """Sum over the rows of Huber's loss of the log error."""
    total = 0.0
    for outcome in leads(points, k):
        size = min(1.0, _size(outcome))
        value = size**2 if size < 0.35 else 0.35 * (2 * size - 0.35)
        total += value * (0.3 if outcome.assumed else 1.0)
    return total


def fit(points: Sequence[Point]) -> Constants:
    """Constants of least loss, by coordinate search from START."""
    best, k = loss(points, START), START
    for factor in (1.3, 1.12, 1.05):
        moved = True
        while moved:
            moved = False
            for field in fields(k):
                for change in (factor, 1 / factor):
                    value = getattr(k, field.name) * change
                    if field.name in SHARES and value > LARGEST_SHARE:
                        continue
                    trial = replace(k, **{field.name: value})
                    found = loss(points, trial)
                    if found < best - 1e-6:
                        best, k, moved = found, trial, True
    return k


def publisher(point: Point) -> str:
    """First word of the column `source`: all tables of a publisher are left out together."""
    return re.split(r"\W", point.text("source") + " ")[0].lower()


def left_out(points: Sequence[Point], names: Sequence[str]) -> list[Outcome]:
    """Each row predicted with constants that are fitted to the rows of other names.

    Args:
        points: all rows.
        names: name of each row's group.
    """
    tested = []
    for name in dict.fromkeys(names):
        k = fit([p for p, group in zip(points, names, strict=True) if group != name])
        tested += leads([p for p, group in zip(points, names, strict=True) if group == name], k)
    return tested


def _size(outcome: Outcome) -> float:
    """Absolute log error."""
    assert outcome.predicted is not None
    return abs(math.log(outcome.predicted / outcome.published))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--folds", type=int, default=0, help="cross-validate with that many folds")
    chosen.add_argument("--sources", action="store_true", help="leave out one publisher at a time")
    chosen.add_argument("--kept", action="store_true", help="use constants.py instead of a fit")
    given = parser.parse_args()
    points = read_points(POINTS)
    if given.folds:
        tested = left_out(points, [str(i % given.folds) for i in range(len(points))])
    elif given.sources:
        tested = left_out(points, [publisher(point) for point in points])
    else:
        k = CONSTANTS if given.kept else fit(points)
        print("\n".join(f"{name} = {value:.3g}" for name, value in asdict(k).items()))
        tested = leads(points, k)
    for outcome in sorted(tested, key=_size)[-12:]:
        row = f"{outcome.point.text('id')}: {outcome.point.text('framework')}"
        print(f"{row}, {outcome.quantity}: off by a factor of {math.exp(_size(outcome)):.2f}")
    for group in (
        errors("all rows", tested),
        errors("all inputs published", [o for o in tested if not o.assumed]),
    ):
        print(f"{group.name}: {group.count} rows, median {group.median:.1%}, 90 % {group.p90:.1%}")


if __name__ == "__main__":
    main()
