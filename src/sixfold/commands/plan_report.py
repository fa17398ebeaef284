"""`sixfold plan TARGET`: will it fit, how fast, what limits it, what does it cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..planning.constants import CONSTANTS
from ..planning.hardware import Cluster
from ..planning.planner import Comparison, TopologyPlan, compare_topologies
from ..planning.run_cost import run_hours, run_price
from ..planning.step_time import useful_tokens_per_second
from ..report.untrusted import one_line
from .plan_advice import async_rows, group_rows, limit_rows, sensitivity_rows, split_rows, sync_rows
from .plan_inputs import Inputs, read_inputs
from .plan_layout import Rows, Table, print_section, print_table
from .plan_memory import copy_rows, pool_rows, shared_rows
from .plan_simulation import SimulationRequest, print_simulation, simulated_groups


def plan_report(
    target: str,
    settings: Sequence[str],
    cluster: Cluster,
    *,
    mean_tokens: float | None,
    pass_rate: float,
    variation: float,
    simulation: SimulationRequest | None,
) -> int:
    """Print one page about a recipe or a model on given devices.

    Args:
        target: recipe or model, as for `read_inputs`.
        settings: flags that change the recipe.
        cluster: the devices.
        mean_tokens: mean length of completions. None: half of the bound.
        pass_rate: share of correct samples.
        variation: coefficient of variation of the lengths in a group.
        simulation: what to simulate. None: nothing.

    Raises:
        UserError: if the target is unknown, or the devices cannot hold the model's weights.
    """
    inputs = read_inputs(target, settings, mean_tokens=mean_tokens)
    if simulation is not None:
        groups = simulated_groups(inputs, simulation, variation=variation, pass_rate=pass_rate)
    # Nothing of Sixfold is offloaded between the phases.
    constants = replace(CONSTANTS, switch_s=0.0)
    found = compare_topologies(inputs.arch, cluster, inputs.work, constants)
    together = found.topologies["colocated"]
    memory, fits = shared_rows(inputs, cluster)
    print(_title(inputs, cluster))
    print_section("Work of a step", _work_rows(inputs))
    print_section(f"Memory of each {cluster.device.name}, all roles on it", memory)
    apart = found.topologies.get("disaggregated")
    apart_fits: bool | None = False
    if apart is not None:
        pools, apart_fits = pool_rows(inputs, cluster, apart)
        print_section(
            "Memory per device with two pools (estimate)",
            [*pools, *copy_rows(inputs, apart)],
        )
    print_table("Seconds of a step (estimate)", _step_rows(inputs, found))
    print_section("What limits it", [_longest(together), *limit_rows(inputs, cluster, together)])
    print_section("Groups", group_rows(inputs, pass_rate, variation))
    if apart is not None:
        print_section(
            "Two pools",
            [
                *split_rows(cluster, found, inputs),
                *sync_rows(inputs, cluster, apart, constants),
                *async_rows(cluster, apart),
            ],
        )
    print_section(
        "Seconds of a colocated step if one assumption is worse by a third",
        sensitivity_rows(inputs, cluster, constants),
    )
    print_section(
        "Time and cost", _cost_rows(inputs, cluster, found, _fitting(found, fits, apart_fits))
    )
    if simulation is not None:
        print_simulation(inputs, cluster, constants, simulation, groups)
    return 0


def _fitting(
    found: Comparison, together: bool | None, apart: bool | None
) -> tuple[TopologyPlan, ...]:
    """Topologies that are not known to exceed the memory of the devices.

    Args:
        found: predictions.
        together: the colocated run fits. None: not known.
        apart: two pools fit. None: not known.
    """
    fits = {"colocated": together is not False}
    return tuple(p for p in found.topologies.values() if fits.get(p.name, apart is not False))


def _title(inputs: Inputs, cluster: Cluster) -> str:
    device = cluster.device
    return (
        f"Plan of {one_line(inputs.title)} on {cluster.count} x {one_line(device.name)}"
        f" ({device.memory_gb:g} GB each). Nothing was started or loaded.\n"
        "Times come from a model of published runs; docs/planning.md has its errors."
    )


def _work_rows(inputs: Inputs) -> Rows:
    work, arch = inputs.work, inputs.arch
    size = f"{arch.params_b:.3g} billion parameters"
    if arch.experts:
        size += f", {arch.active_b:.3g} active"
    return [
        ("model", f"{one_line(arch.name)}: {size}; sizes from {inputs.sizes_from}"),
        (
            "samples",
            f"{work.prompts} prompts x {work.samples}, prompts of {work.prompt_tokens:,.0f} tokens,"
            f" completions of {work.mean_tokens:,.0f} (at most {work.longest_tokens:,.0f})",
        ),
        ("assumed", "; ".join((*inputs.assumed, "reward checks hide behind sampling"))),
    ]


def _longest(plan: TopologyPlan) -> tuple[str, str]:
    seconds = getattr(plan.phases, plan.phases.dominant)
    return "longest phase", f"{plan.phases.dominant}, {seconds / plan.phases.total:.0%} of the step"


def _step_rows(inputs: Inputs, found: Comparison) -> Table:
    plans = list(found.topologies.values())
    work = inputs.work
    rows = [
        ("", [plan.name for plan in plans]),
        ("devices", [_devices(plan) for plan in plans]),
    ]
    for name, _ in plans[0].phases.items():
        if name != "verifier":
            rows.append((name, [f"{getattr(plan.phases, name):.2f}" for plan in plans]))
    rows.append(("step", [f"{plan.step.seconds:.2f}" for plan in plans]))
    rows.append(("sampler waits", [f"{_wait(plan, plan.step.sampler_idle):.2f}" for plan in plans]))
    rows.append(("trainer waits", [f"{_wait(plan, plan.step.trainer_idle):.2f}" for plan in plans]))
    rows.append(
        (
            "tokens/s",
            [
                f"{_tokens(work.prompts, work.samples, work.mean_tokens, plan):,.0f}"
                for plan in plans
            ],
        )
    )
    return rows


def _wait(plan: TopologyPlan, idle: float) -> float:
    """Idle seconds of a pool. Colocated roles take turns: no device waits."""
    return 0.0 if plan.name == "colocated" else max(0.0, idle)


def _devices(plan: TopologyPlan) -> str:
    if plan.name == "colocated":
        return str(plan.training_devices)
    return f"{plan.sampling_devices} + {plan.training_devices}"


def _tokens(prompts: int, samples: int, mean: float, plan: TopologyPlan) -> float:
    return useful_tokens_per_second(
        prompts=prompts,
        samples=samples,
        mean_length=mean,
        keep_rate=1.0,
        seconds=plan.step.seconds,
    )


def _cost_rows(
    inputs: Inputs, cluster: Cluster, found: Comparison, fitting: tuple[TopologyPlan, ...]
) -> Rows:
    steps = inputs.plan.recipe.run.steps
    rows = [(name, _cost(steps, cluster, plan)) for name, plan in found.topologies.items()]
    if fitting:
        best = min(fitting, key=lambda plan: plan.step.seconds).name
        rows.append(("recommended", f"{best}: the fastest that fits, by this estimate"))
    else:
        rows.append(("recommended", "none fits: see what would help, above"))
    rows.append(("note", "Sixfold itself trains colocated"))
    if cluster.device.price_per_hour is not None:
        price = f"{cluster.device.price_per_hour:g} US dollars per device and hour"
        rows.append(("price", f"{price} ({one_line(cluster.device.price_source)})"))
    return rows


def _cost(steps: int, cluster: Cluster, plan: TopologyPlan) -> str:
    hours = run_hours(steps=steps, seconds_per_step=plan.step.seconds)
    days = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"
    text = f"{steps:,} steps in {days}; {24 * plan.step.steps_per_hour:,.0f} steps per day"
    if cluster.device.price_per_hour is not None:
        price = run_price(
            hours=hours,
            devices=cluster.count,
            price_per_device_hour=cluster.device.price_per_hour,
        )
        text += f"; {price:,.2f} US dollars"
    return text
