"""Results of `sixfold plan --simulate` on the page with sliders. No slider changes them."""

from __future__ import annotations

from ..labs.lab import Bars, Figure, Outcome, Table
from .plan_simulation import SimulationResult, simulation_rows, simulation_tables

NOTE = "No slider changes the simulation: it is of the plan with which this page was made."


def simulation_outcome(result: SimulationResult) -> Outcome:
    """Tables as `sixfold plan` prints them; use of the devices, stragglers and staleness as bars.

    Args:
        result: what was simulated.
    """
    title, rows = simulation_rows(result)
    tables = [Table(title, ("", ""), [list(row) for row in rows])]
    for title, ((_, names), *body) in simulation_tables(result):
        cells = [[label, *row] for label, row in body]
        tables.append(Table(title, ("", *names), cells))
    return Outcome({}, tuple(tables), _figures(result), (NOTE,))


def _figures(result: SimulationResult) -> tuple[Figure, ...]:
    found = {name: one.outcome for name, one in result.topologies.items()}
    names, outcomes = list(found), list(found.values())
    share = "share of time"
    return (
        Bars(
            "Sampling devices busy, simulated", share, names, [o.shares.sampling for o in outcomes]
        ),
        Bars(
            "Training devices busy, simulated", share, names, [o.shares.training for o in outcomes]
        ),
        Bars(
            "Straggler tax of a step, simulated",
            "longest / mean - 1",
            names,
            [o.longest - 1 for o in outcomes],
        ),
        *(
            Bars(
                f"Staleness, {name}, simulated",
                "share of groups, by weight versions",
                [str(age) for age in sorted(outcome.staleness)],
                [outcome.staleness[age] for age in sorted(outcome.staleness)],
            )
            for name, outcome in found.items()
        ),
    )
