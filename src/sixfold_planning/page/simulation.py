"""`sixfold plan TARGET --simulate`: what differing lengths, staleness and failures cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.report.rollouts import dumped_steps, read_rollouts
from sixfold.types import Trajectory

from ..constants import Constants
from ..hardware import Cluster
from ..planned_work import Inputs
from ..planner import TopologyPlan, compare_topologies
from ..simulate.groups import Groups, LogNormalGroups, RecordedGroup, RecordedGroups
from ..simulate.outcome import Outcome
from ..simulate.settings import Failures, Settings, expected_slowdown
from ..simulate.simulation import Simulation
from ..simulate.timing import planned_timing
from .layout import Rows, Table, print_section, print_table

FACTORS = (0.25, 0.5, 1, 2)
"""Samples per prompt that are compared, as multiples of those of the recipe."""

FAILURE_RUNS = 5
"""Simulations with failures, which are rare events."""


NEWEST = 20
"""Dumps that are read: the newest ones, because lengths and rewards change during a run."""


def recorded_groups(folder: Path) -> RecordedGroups:
    """Groups of the newest rollout dumps of a run.

    Raises:
        UserError: if the run has no rollouts, or a dump cannot be read.
    """
    run = RunFolder(folder)
    steps = dumped_steps(run.rollouts)[-NEWEST:]
    groups = [group for step in steps for group in _groups(run.rollout_file(step))]
    if not groups:
        raise UserError(
            f"{folder} has no rollouts: train with log.rollouts_every = 1, or leave --run out"
        )
    return RecordedGroups(groups)


def _groups(path: Path) -> list[RecordedGroup]:
    """Groups of one dump, which writes the samples of a group one after the other."""
    groups: list[list[Trajectory]] = []
    for record in read_rollouts(path):
        sample = Trajectory.from_record(record)
        last = groups[-1] if groups else []
        tasks, samples = {other.task_id for other in last}, {other.sample for other in last}
        if sample.task_id not in tasks or sample.sample in samples:
            groups.append([])
        groups[-1].append(sample)
    return [
        RecordedGroup(
            tuple(sample.sampled_length for sample in group),
            tuple(sample.reward.value if sample.reward else None for sample in group),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class SimulationRequest:
    """What `--simulate` and its options ask for.

    Attributes:
        staleness: bound of the staleness of the async topology, in weight versions.
        recorded: groups of an earlier run. None: log-normal lengths and a pass rate.
        device_hours: mean time between failures of one device, in hours. None: none fails.
        restart_seconds: duration of a restart after a failure.
    """

    steps: int
    staleness: int
    seed: int
    recorded: RecordedGroups | None
    device_hours: float | None
    restart_seconds: float


def simulated_groups(
    inputs: Inputs, request: SimulationRequest, *, variation: float, pass_rate: float
) -> Groups:
    """Source of lengths and rewards: the earlier run, or log-normal lengths.

    Raises:
        UserError: if groups of the run are too small for the plan, or its completions too long.
    """
    work, recorded = inputs.work, request.recorded
    if recorded is None:
        return LogNormalGroups(work.mean_tokens, variation, work.longest_tokens, pass_rate)
    if max(recorded.lengths) > work.longest_tokens:
        raise UserError(
            f"--run has completions of {max(recorded.lengths):,} tokens, and the plan allows"
            f" {work.longest_tokens:,.0f}: raise rollout.max_new_tokens"
        )
    if work.samples > recorded.largest:
        raise UserError(
            f"--run has groups of at most {recorded.largest} samples, and the plan needs"
            f" {work.samples}: lower rollout.samples_per_prompt, or use another run"
        )
    return recorded


@dataclass(frozen=True)
class Simulated:
    """A simulated topology."""

    plan: TopologyPlan
    outcome: Outcome


@dataclass(frozen=True)
class FailureCosts:
    """What failures cost.

    Attributes:
        expected: closed form of the slowdown, by topology. Infinite if the run never ends.
    """

    runs: tuple[Mapping[str, Simulated], ...]
    expected: Mapping[str, float]


@dataclass(frozen=True)
class SimulationResult:
    """Results of the simulations of one page.

    Attributes:
        groups: source of lengths and rewards.
        topologies: by name, with the recipe's samples per prompt.
        by_samples: samples per prompt -> topologies.
        failures: with failures of devices. None: not simulated.
    """

    request: SimulationRequest
    groups: Groups
    topologies: Mapping[str, Simulated]
    by_samples: Mapping[int, Mapping[str, Simulated]]
    failures: FailureCosts | None


def simulate(
    inputs: Inputs, cluster: Cluster, k: Constants, request: SimulationRequest, groups: Groups
) -> SimulationResult:
    """Simulate the topologies, other numbers of samples per prompt, and failures.

    Args:
        k: constants of the time model.
        groups: from `simulated_groups`.

    Raises:
        UserError: if devices fail too often.
    """
    simulator = _Simulator(inputs, cluster, k, request, groups)
    found = simulator.topologies(inputs.work.samples, None, request.seed)
    costs = None
    by_samples = _by_samples(simulator, found)
    if request.device_hours is not None:
        costs = _failure_costs(simulator, request.device_hours, found)
    return SimulationResult(request, groups, found, by_samples, costs)


def simulation_rows(result: SimulationResult) -> tuple[str, Rows]:
    """Title, and what was simulated."""
    request = result.request
    return f"Simulation of {request.steps} steps (seed {request.seed})", [
        ("groups", _describe(result.groups)),
        ("async", f"staleness of at most {request.staleness} weight versions"),
    ]


def simulation_tables(result: SimulationResult) -> list[tuple[str, Table]]:
    """Titles and tables: topologies, samples per prompt, failures."""
    request = result.request
    tables = [
        ("Simulated topologies", _topology_rows(result.topologies)),
        (
            "Useful tokens/s by samples per prompt (simulated, each with its best split)",
            _sample_rows(result),
        ),
    ]
    if result.failures is not None:
        title = (
            f"Failures: one per device every {request.device_hours:g} h on average, restart in"
            f" {request.restart_seconds:g} s (mean of {FAILURE_RUNS} simulations)"
        )
        tables.append((title, _failure_rows(result.failures, result.topologies)))
    return tables


def print_simulation(result: SimulationResult) -> None:
    print_section(*simulation_rows(result))
    for title, table in simulation_tables(result):
        print_table(title, table)


def _describe(groups: Groups) -> str:
    if isinstance(groups, LogNormalGroups):
        return (
            f"log-normal lengths, variation {groups.variation:g}, truncated at"
            f" {groups.longest:,.0f} tokens; pass rate {groups.pass_rate:g}"
        )
    assert isinstance(groups, RecordedGroups)
    lengths = groups.lengths
    return (
        f"{len(groups)} of the run: completions of {groups.mean:,.0f} tokens"
        f" ({min(lengths):,} to {max(lengths):,}), {groups.solved:.0%} with a positive reward"
    )


@dataclass(frozen=True)
class _Simulator:
    """Everything that simulations of one page have in common."""

    inputs: Inputs
    cluster: Cluster
    k: Constants
    request: SimulationRequest
    groups: Groups

    def topologies(
        self, samples: int, failures: Failures | None, seed: int
    ) -> dict[str, Simulated]:
        """Simulate every topology.

        Args:
            samples: samples per prompt.
            failures: failures of devices. None: none fails.
        """
        arch, request = self.inputs.arch, self.request
        work = replace(self.inputs.work, samples=samples)
        found = {}
        for name, plan in compare_topologies(arch, self.cluster, work, self.k).topologies.items():
            settings = Settings(
                topology=name,
                prompts=work.prompts,
                samples=samples,
                steps=request.steps,
                staleness=request.staleness,
                attempts=max(1, self.inputs.plan.algorithm.dynamic_sampling),
                failures=failures,
                seed=seed,
            )
            timing = planned_timing(arch, self.cluster.device, plan, work, self.k)
            outcome = Simulation(timing, self.groups, settings).run()
            found[name] = Simulated(plan, outcome)
        return found


def _topology_rows(found: Mapping[str, Simulated]) -> Table:
    def row(label: str, cell: Callable[[Outcome], str]) -> tuple[str, list[str]]:
        return label, [cell(one.outcome) for one in found.values()]

    ages = sorted({age for one in found.values() for age in one.outcome.staleness})
    staleness = [one.outcome.staleness for one in found.values()]
    return [
        ("", list(found)),
        row("step, seconds", lambda o: f"{o.step_seconds:.2f}"),
        row("sampling devices busy", lambda o: f"{o.shares.sampling:.0%}"),
        row("training devices busy", lambda o: f"{o.shares.training:.0%}"),
        row("all devices idle", lambda o: f"{o.shares.idle:.0%}"),
        row("sequences per engine", lambda o: f"{o.shares.running:.1f}"),
        row("longest / mean of a step", lambda o: f"{o.longest:.2f}"),
        row("equal rewards", lambda o: f"{o.equal:.1%}"),
        *(
            (f"staleness {age}", [f"{shares.get(age, 0):.0%}" for shares in staleness])
            for age in ages
        ),
        row("tokens/s", lambda o: f"{o.tokens_per_second:,.0f}"),
        row("useful tokens/s", lambda o: f"{o.useful_per_second:,.0f}"),
    ]


def _by_samples(
    simulator: _Simulator, usual: Mapping[str, Simulated]
) -> dict[int, Mapping[str, Simulated]]:
    """Topologies with other numbers of samples per prompt.

    A recorded group cannot show more samples than it has.
    """
    own, groups = simulator.inputs.work.samples, simulator.groups
    counts = {max(2, round(factor * own)) for factor in FACTORS} | {own}
    if isinstance(groups, RecordedGroups):
        counts = {samples for samples in counts if samples <= groups.largest}
    seed = simulator.request.seed
    return {
        samples: usual if samples == own else simulator.topologies(samples, None, seed)
        for samples in sorted(counts)
    }


def _sample_rows(result: SimulationResult) -> Table:
    rows: Table = [("", [*result.topologies, "longest/mean", "equal rewards"])]
    for samples, found in result.by_samples.items():
        one = found["colocated"].outcome
        cells = [f"{other.outcome.useful_per_second:,.0f}" for other in found.values()]
        cells += [f"{one.group_longest:.2f}", f"{one.equal:.1%}"]
        rows.append((f"{samples} samples", cells))
    return rows


def _failure_costs(
    simulator: _Simulator, device_hours: float, without: Mapping[str, Simulated]
) -> FailureCosts:
    """Several simulations with failures, and the closed form."""
    every = simulator.inputs.plan.recipe.checkpoint.every
    failures = Failures(3600 * device_hours, simulator.request.restart_seconds, every)
    first, samples = simulator.request.seed, simulator.inputs.work.samples
    runs = tuple(
        simulator.topologies(samples, failures, seed) for seed in range(first, first + FAILURE_RUNS)
    )
    return FailureCosts(runs, {name: _slowdown(failures, one) for name, one in without.items()})


def _failure_rows(costs: FailureCosts, without: Mapping[str, Simulated]) -> Table:
    """Mean of several simulations, and the closed form."""

    def mean(name: str, value: Callable[[Outcome], float]) -> float:
        return sum(value(run[name].outcome) for run in costs.runs) / len(costs.runs)

    def row(label: str, form: str, value: Callable[[Outcome], float]) -> tuple[str, list[str]]:
        return label, [format(mean(name, value), form) for name in without]

    ideal = [one.outcome.total_seconds for one in without.values()]
    longer = [mean(name, lambda o: o.total_seconds) for name in without]
    return [
        ("", list(without)),
        row("failures", ".1f", lambda o: o.failures),
        row("tokens lost", ".1%", lambda o: o.tokens.lost / o.tokens.sampled),
        row("useful tokens/s", ",.0f", lambda o: o.useful_per_second),
        ("time, relative", [f"{a / b:.2f}" for a, b in zip(longer, ideal, strict=True)]),
        ("closed form", [f"{costs.expected[name]:.2f}" for name in without]),
    ]


def _slowdown(failures: Failures, one: Simulated) -> float:
    """Expected slowdown by failures of training devices, each of which stops the run."""
    segment = failures.checkpoint_steps * one.outcome.step_seconds
    if not 0 < segment < one.outcome.total_seconds:
        segment = one.outcome.total_seconds
    return expected_slowdown(
        segment, rate=failures.rate(one.plan.training_devices), restart=failures.restart_seconds
    )
