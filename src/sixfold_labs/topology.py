"""Steps per hour of the three topologies, and their timelines."""

from __future__ import annotations

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Span, Table, Timeline, Value
from sixfold_planning.step_time import TOPOLOGIES, PhaseSeconds, StepTime, step_time

SHOWN_STEPS = 4


def phases(rollout: float, train: float, sync: float) -> PhaseSeconds:
    """Phases of a step in seconds, without verifier and reference."""
    return PhaseSeconds(rollout=rollout, verifier=0, reference=0, trainer=train, sync=sync)


def timeline(topology: str, step: StepTime, times: PhaseSeconds) -> Timeline:
    """Gantt chart of four steps, with batch numbers from 0.

    Colocated phases follow each other on one pool. The other topologies train batch n while they
    sample batch n + 1; async syncs on the side.
    """
    spans: list[Span] = []
    for n in range(SHOWN_STEPS):
        start = n * step.seconds
        if topology == "colocated":
            train = start + times.rollout
            sync = train + times.trainer
            rows = ("GPUs", "GPUs", "GPUs")
        else:
            train = start
            sync = start + (times.trainer if topology == "async" else step.seconds - times.sync)
            rows = ("rollout GPUs", "trainer GPUs", "sync")
        spans.append(Span(rows[0], start, start + times.rollout, "rollout"))
        if topology == "colocated" or n > 0:
            spans.append(Span(rows[1], train, train + times.trainer, "train"))
            spans.append(Span(rows[2], sync, sync + times.sync, "sync"))
    return Timeline(f"{SHOWN_STEPS} steps, {topology}", "seconds", spans)


def topology(*, rollout: float, train: float, sync: float) -> Outcome:
    """Compare the topologies."""
    times = phases(rollout, train, sync)
    steps = {name: step_time(times, topology=name, sync_hidden=True) for name in TOPOLOGIES}
    hourly = [steps[name].steps_per_hour for name in TOPOLOGIES]
    rows: list[list[Value]] = [
        [name, steps[name].seconds, steps[name].steps_per_hour] for name in TOPOLOGIES
    ]
    return Outcome(
        values={
            "steps_per_hour_colocated": hourly[0],
            "steps_per_hour_disaggregated": hourly[1],
            "steps_per_hour_async": hourly[2],
            "async_speedup": hourly[2] / hourly[0],
        },
        tables=(Table("Topologies", ("topology", "seconds per step", "steps per hour"), rows),),
        figures=(
            Bars("Steps per hour", "steps per hour", TOPOLOGIES, hourly),
            *(timeline(name, steps[name], times) for name in TOPOLOGIES),
        ),
        lines=("Compare topologies by time to a result: steps with stale samples are worth less.",),
    )


TOPOLOGY = Lab(
    name="topology",
    title="Colocated, disaggregated and async: steps per hour from three durations",
    about=(
        "A step takes R + T + S colocated, max(R, T) + S disaggregated and max(R, T) async, where"
        " rollout takes R, training T and weight sync S seconds. Async hides the sync. The phases"
        " have the same duration in every topology: the model ignores that two pools have fewer"
        " devices each."
    ),
    controls=(
        Control("rollout", 20.0, "seconds of rollout", unit="s", low=1.0, high=60.0, step=1.0),
        Control("train", 15.0, "seconds of training", unit="s", low=1.0, high=60.0, step=1.0),
        Control("sync", 2.0, "seconds of weight sync", unit="s", low=0.0, high=20.0, step=1.0),
    ),
    run=topology,
    breaking=Breaking(
        breaks={"rollout": 60.0, "train": 10.0, "sync": 5.0},
        safe={},
        why="If one phase dominates, overlapping the others with it saves little.",
        failed=lambda outcome: outcome.number("async_speedup") < 1.3,
    ),
)

LABS = (TOPOLOGY,)
