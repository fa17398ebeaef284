"""`sixfold plan TARGET --html FILE`: the plan as a page with sliders. No torch.

The page holds answers of `plan_answer` for every combination of positions; the browser computes
nothing. Each answer comes with the command that prints it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from sixfold.environment.pass_rate import degenerate_share
from sixfold.errors import UserError
from sixfold.files.durable import check_target
from sixfold.pages.combinations import Combinations, Part
from sixfold.pages.lab import Bars, Figure, Outcome, Span, Table, Timeline, Value
from sixfold.pages.page import ControlPage, write_controls
from sixfold.report.untrusted import one_line

from ..constants import CONSTANTS
from ..planned_work import Inputs
from ..planner import TopologyPlan
from ..stragglers import exact_longest
from .advice import group_rows
from .answer import (
    POOLS_TITLE,
    TOPOLOGIES_TITLE,
    TWO_POOLS_TITLE,
    Answer,
    accuracy,
    all_limit_rows,
    answer,
    cost_rows,
    duration,
    longest_phase,
    memory_title,
    topology_table,
    two_pool_rows,
    work_rows,
)
from .inputs import read_inputs
from .memory import SharedMemory
from .question import PROMPTS, SAMPLES, PlanQuestion, controls
from .simulation import (
    SimulationRequest,
    SimulationResult,
    simulate,
    simulated_groups,
    simulation_rows,
    simulation_tables,
)

PHASES = ("rollout", "reference", "trainer", "sync")


def write_plan_page(
    question: PlanQuestion, path: Path, simulation: SimulationRequest | None = None
) -> None:
    """Write the page to `path`.

    Args:
        simulation: what to simulate. None: nothing.

    Raises:
        UserError: if the target is unknown, the devices cannot hold the model's weights, the
            simulation is not possible, or `path` is a folder, or its folder does not exist.
    """
    check_target(path)
    inputs, cluster = question.inputs, question.cluster
    answer(inputs, cluster)  # a mistake of the user is not an outcome
    simulated = None
    if simulation is not None:
        groups = simulated_groups(
            inputs, simulation, variation=question.variation, pass_rate=question.rate
        )
        result = simulate(inputs, cluster, CONSTANTS, simulation, groups)
        simulated = simulation_outcome(result)
    write_controls(plan_page(question, simulated), question.settings, path)


def plan_page(question: PlanQuestion, simulated: Outcome | None = None) -> ControlPage:
    """Controls and outcomes of the page.

    Args:
        simulated: results of a simulation. None: there are none.
    """
    parts = _parts(question)
    if simulated is not None:
        parts += (Part((), lambda: simulated),)
    found = Combinations(parts, question.words)
    name = one_line(question.target)
    return ControlPage(
        name=f"plan of {name}",
        title=f"Plan of {name}",
        about=(
            "Will it fit, how long does a step take, what limits it and what does it cost? The"
            " command below prints the same numbers. Nothing was started or loaded."
            f" {accuracy(question.cluster)}"
        ),
        controls=controls(question),
        found=found,
        general=(
            f"sixfold plan {shlex.quote(question.target)} --gpus COUNTxNAME --{PROMPTS} VALUE"
            f" --{SAMPLES} VALUE --length TOKENS --variation VALUE --pass-rate SHARE"
        ),
        ending=(
            "What is assumed",
            "Colocated devices switch between sampling and training in no time: all roles stay in"
            " memory. Reward checks hide behind sampling. Lengths and the pass rate do not change"
            " during training. Sixfold trains colocated; the other topologies show what separate"
            " devices would give. The command also prints how long a step takes if one"
            " assumption is a third worse.",
        ),
        most=sys.maxsize,
    )


def _parts(question: PlanQuestion) -> tuple[Part, ...]:
    """The answer, and the rows about groups, each with the controls on which it depends."""

    @cache
    def inputs(prompts: int, samples: int, length: float) -> Inputs:
        flags = question.changed_flags(prompts, samples)
        asked = read_inputs(question.target, flags, mean_tokens=length)
        same = length == question.inputs.work.mean_tokens
        return replace(asked, assumed=question.inputs.assumed) if same else asked

    @cache
    def memory(devices: int, prompts: int, samples: int) -> SharedMemory:
        return SharedMemory(
            inputs(prompts, samples, question.inputs.work.mean_tokens).plan, devices
        )

    def planned(
        *, accelerator: str, devices: int, prompts: int, samples: int, length: float
    ) -> Outcome:
        cluster = question.devices(accelerator, devices)
        try:
            asked = inputs(prompts, samples, length)
            return outcome(answer(asked, cluster, memory(devices, prompts, samples)))
        except UserError as error:
            return Outcome({"plan": "not possible"}, lines=(f"{one_line(str(error))}.",))

    return (
        Part(("accelerator", "devices", "prompts", "samples", "length"), planned),
        *group_parts(question.inputs, question.rates, question.variation),
    )


def group_parts(inputs: Inputs, rates: Sequence[float], variation: float) -> tuple[Part, ...]:
    """The rows of `group_rows`, each with its value and the controls on which it depends.

    Args:
        rates: pass rates of tasks. They hold while the control stands at their mean; elsewhere all
            tasks have the rate of the control.
        variation: coefficient of variation of lengths where a row does not depend on it.
    """
    average = fmean(rates)

    def row(
        place: int, samples: int, length: float, some: Sequence[float], spread: float
    ) -> tuple[Table]:
        work = replace(inputs.work, samples=samples, mean_tokens=length)
        rows = group_rows(replace(inputs, work=work), some, spread)
        return (Table("Groups", ("", ""), [list(rows[place])]),)

    usual = inputs.work.mean_tokens

    def rewards(*, samples: int, pass_rate: float) -> Outcome:
        some = rates if pass_rate == average else [pass_rate]
        share = degenerate_share(some, samples)
        table = row(0, samples, usual, some, variation)
        return Outcome({"groups without a gradient": f"{share:.1%}"}, table)

    def prompt(*, samples: int, length: float) -> Outcome:
        return Outcome({}, row(1, samples, length, rates, variation))

    def longest(*, samples: int, variation: float) -> Outcome:
        times = exact_longest(1.0, variation=variation, samples=samples)
        table = row(2, samples, usual, rates, variation)
        return Outcome({"longest sample of a group": f"{times:.1f} x the mean"}, table)

    return (
        Part(("samples", "pass_rate"), rewards),
        Part(("samples", "length"), prompt),
        Part(("samples", "variation"), longest),
    )


def outcome(given: Answer) -> Outcome:
    """An answer as values, tables and charts, with the numbers as `sixfold plan` prints them."""
    together, running = given.together, given.running
    values: dict[str, Value] = {
        "all roles on the same devices": _fits(given.fits),
        "two pools": _fits(given.pools_fit) if given.apart else "need more devices",
        "Sixfold": given.verdict.text,
        "seconds of a colocated step": f"{together.step.seconds:.2f}",
        "longest phase": longest_phase(together),
    }
    if running is not None:
        price = given.price(running)
        values["seconds of a step that Sixfold runs"] = f"{running.step.seconds:.2f}"
        values["time of the run"] = duration(given.hours(running))
        values["US dollars"] = "price not known" if price is None else f"{price:,.2f}"
    head, *rows = topology_table(given)
    sections = (
        (memory_title(given), given.memory),
        (POOLS_TITLE, given.pools),
        ("Time and cost", cost_rows(given)),
        ("What limits it", all_limit_rows(given)),
        (TWO_POOLS_TITLE, two_pool_rows(given)),
        ("Work of a step", work_rows(given.inputs)),
    )
    return Outcome(
        values,
        tables=(
            Table(TOPOLOGIES_TITLE, ("", *head[1]), [[label, *cells] for label, cells in rows]),
            *(
                Table(title, ("", ""), [list(row) for row in part])
                for title, part in sections
                if part
            ),
        ),
        figures=_figures(given),
    )


def _fits(fits: bool | None) -> str:
    return "not known" if fits is None else "fit" if fits else "do not fit"


def _figures(given: Answer) -> tuple[Figure, ...]:
    """Phases of each topology as bars, and one step of all of them on a common axis."""
    plans = list(given.found.topologies.values())
    spans = [span for plan in plans for span in _spans(plan)]
    return (
        Timeline("One step of each topology", "seconds", spans),
        *(
            Bars(
                f"Phases, {plan.name}",
                "seconds",
                PHASES,
                [getattr(plan.phases, name) for name in PHASES],
            )
            for plan in plans
        ),
    )


def _spans(plan: TopologyPlan) -> list[Span]:
    """One step. Pools work at the same time; only async training also syncs at that time."""
    phases, step = plan.phases, plan.step
    if plan.name == "colocated":
        return _sequence("colocated", [(name, getattr(phases, name)) for name in PHASES])
    label = "pools" if plan.name == "disaggregated" else "async"
    spans = [
        *_sequence(f"{label}: sampler", [("rollout", phases.rollout)]),
        *_sequence(
            f"{label}: trainer", [("reference", phases.reference), ("trainer", phases.trainer)]
        ),
    ]
    start = 0.0 if plan.name == "async" else step.seconds - phases.sync
    return [*spans, Span(f"{label}: sync", start, start + phases.sync, "sync")]


def _sequence(row: str, parts: Sequence[tuple[str, float]]) -> list[Span]:
    """Spans one after another. Phases that take no time are left out."""
    spans, start = [], 0.0
    for kind, seconds in parts:
        if seconds:
            spans.append(Span(row, start, start + seconds, kind))
        start += seconds
    return spans


NOTE = "No slider changes the simulation: it is of the plan with which this page was made."


def simulation_outcome(result: SimulationResult) -> Outcome:
    """Tables as `sixfold plan` prints them; use of devices, stragglers and staleness as bars."""
    title, rows = simulation_rows(result)
    tables = [Table(title, ("", ""), [list(row) for row in rows])]
    for title, ((_, names), *body) in simulation_tables(result):
        cells = [[label, *row] for label, row in body]
        tables.append(Table(title, ("", *names), cells))
    return Outcome({}, tuple(tables), _simulation_figures(result), (NOTE,))


def _simulation_figures(result: SimulationResult) -> tuple[Figure, ...]:
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
