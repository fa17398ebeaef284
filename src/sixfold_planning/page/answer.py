"""What `sixfold plan` says about a model on given devices, as text and as a page."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sixfold.errors import UserError
from sixfold.report.untrusted import one_line

from ..constants import CONSTANTS
from ..hardware import Cluster
from ..placed import COLOCATED, OWN, Placed, placed_step
from ..planned_work import Inputs, placed, trainer_threads
from ..planner import Comparison, TopologyPlan, compare_topologies
from ..step_time import useful_tokens_per_second
from .advice import async_rows, limit_rows, split_rows, sync_rows
from .layout import Rows, Table
from .memory import SharedMemory, copy_rows, pool_rows, shared_rows
from .verdict import RUNS, UNKNOWN, WITH_SETTINGS, Verdict, verdict_of

POOLS_TITLE = "Memory per device with two pools (estimate)"
TOPOLOGIES_TITLE = "Seconds of a step (estimate)"
TWO_POOLS_TITLE = "Two pools (in Sixfold each sampler serves one trainer rank)"


@dataclass(frozen=True)
class Answer:
    """Predictions for one model, workload and set of devices.

    Attributes:
        found: seconds of a step by topology.
        fits: all roles fit on one set of devices. None: not known.
        pools: memory per device of two pools. Empty for one device.
        pools_fit: both pools fit. None: not known.
        verdict: whether Sixfold runs this.
    """

    inputs: Inputs
    cluster: Cluster
    found: Comparison
    memory: Rows
    fits: bool | None
    pools: Rows
    pools_fit: bool | None
    verdict: Verdict

    @property
    def together(self) -> TopologyPlan:
        return self.found.topologies[COLOCATED]

    @property
    def apart(self) -> TopologyPlan | None:
        """Two pools that take turns. None if one replica of the sampler needs all devices."""
        return self.found.topologies.get("disaggregated")

    @property
    def running(self) -> TopologyPlan | None:
        """The step that Sixfold runs, with the settings of the verdict.

        None: it cannot, or the time is not known.
        """
        found = self.verdict.inputs
        if found is None or self.untimed:
            return None
        known = self.verdict.kind != UNKNOWN
        return own_step(found, self.cluster) if known else self.together

    @property
    def untimed(self) -> str:
        """Why the time of a step that Sixfold runs is not known. "" if it is, or runs none."""
        found = self.verdict.inputs
        if found is None or self.verdict.kind == UNKNOWN:
            return ""
        try:
            _placed(found, self.cluster)
        except UserError as error:
            return str(error)
        return ""

    def hours(self, plan: TopologyPlan) -> float:
        """Hours that the run takes with such steps."""
        return self.inputs.plan.recipe.run.steps * plan.step.seconds / 3600

    def price(self, plan: TopologyPlan) -> float | None:
        """US dollars that the run costs with such steps. None if the price is not known."""
        hourly = self.cluster.device.price_per_hour
        return None if hourly is None else self.hours(plan) * self.cluster.count * hourly


def own_step(inputs: Inputs, cluster: Cluster) -> TopologyPlan:
    """A step of Sixfold: samplers where the recipe places them, each rank with its own.

    Raises:
        UserError: if the device was measured with other numbers of threads.
    """
    where = _placed(inputs, cluster)
    return placed_step(inputs.arch, cluster, inputs.work, where, check_s=inputs.check_s)


def _placed(inputs: Inputs, cluster: Cluster) -> Placed:
    recipe = inputs.plan.recipe
    where = recipe.placement, recipe.rollout
    return placed(*where, trainer_threads(*where, recipe.run.threads), cluster.device)


def answer(inputs: Inputs, cluster: Cluster, shared: SharedMemory | None = None) -> Answer:
    """Predict memory and time.

    Args:
        shared: memory of these devices with all roles. None: computed here.

    Raises:
        UserError: if the devices cannot hold the model's weights.
    """
    found = compare_topologies(inputs.arch, cluster, inputs.work, CONSTANTS)
    shared = shared or SharedMemory(inputs.plan, cluster.count)
    memory, fits = shared_rows(shared, cluster.device)
    apart = found.topologies.get("disaggregated")
    pools: Rows = []
    pools_fit: bool | None = False
    if apart is not None:
        pools, pools_fit = pool_rows(inputs, cluster.device, apart)
        pools = [*pools, *copy_rows(inputs, apart)]
    verdict = verdict_of(inputs, cluster, shared)
    given = Answer(inputs, cluster, found, memory, fits, pools, pools_fit, verdict)
    if verdict.kind == RUNS and (own := given.running):
        found = replace(found, topologies={**found.topologies, own.name: own})
    return replace(given, found=found)


def title(given: Answer) -> str:
    """What is planned, on which devices."""
    device = given.cluster.device
    return (
        f"Plan of {one_line(given.inputs.title)} on {given.cluster.count} x"
        f" {one_line(device.name)} ({device.memory_gb:g} GB each)"
    )


def accuracy(cluster: Cluster) -> str:
    """Where predicted times come from: published runs, or calls timed on the device."""
    device, rates = cluster.device, cluster.device.measured
    if rates is None:
        return "Times come from a model of published runs; docs/planning.md has its errors."
    timed = ", ".join(
        f"{name} (up to {table.tokens[-1]:,} {unit})"
        for name, table, unit in (
            ("decode steps", rates.decode, "sequences"),
            ("prefills", rates.prefill, "tokens"),
            ("scoring", rates.score, "tokens"),
            ("training", rates.train, "tokens"),
        )
    )
    text = (
        f"Times come from calls that were timed on {one_line(device.name)} in {rates.dtype}:"
        f" {timed}, optimizer steps, copies of weights and short episodes; docs/planning.md has the"
        " errors."
    )
    if cluster.count > 1:
        text += " Transfers between devices were not timed: a model of published runs gives them."
    return text


def work_rows(inputs: Inputs) -> Rows:
    work, arch = inputs.work, inputs.arch
    size = f"{arch.params_b:.3g} billion parameters"
    if arch.experts:
        size += f", {arch.active_b:.3g} active"
    assumed = (
        *inputs.assumed,
        (
            f"reward checks take {inputs.check_s:g} s after the last token"
            if inputs.check_s
            else "reward checks hide behind sampling (--check)"
        ),
        "colocated devices switch between sampling and training in no time",
    )
    return [
        ("model", f"{one_line(arch.name)}: {size}; sizes from {inputs.sizes_from}"),
        (
            "samples",
            f"{work.prompts} prompts x {work.samples}, prompts of {work.prompt_tokens:,.0f} tokens,"
            f" completions of {work.mean_tokens:,.0f} (at most {work.longest_tokens:,.0f})",
        ),
        ("assumed", "; ".join(assumed)),
    ]


def memory_title(given: Answer) -> str:
    return f"Memory of each {one_line(given.cluster.device.name)}, all roles on it"


def longest_phase(plan: TopologyPlan) -> str:
    """The longest phase, and its share of all phases."""
    seconds = getattr(plan.phases, plan.phases.dominant)
    return f"{plan.phases.dominant}, {seconds / plan.phases.total:.0%} of the step"


def all_limit_rows(given: Answer) -> Rows:
    """Longest phase, and what the roofline says."""
    together = given.together
    limits = limit_rows(given.inputs, given.cluster, together)
    return [("longest phase", longest_phase(together)), *limits]


def two_pool_rows(given: Answer) -> Rows:
    """Split, weight sync and staleness. Empty for one pool."""
    apart = given.apart
    if apart is None:
        return []
    return [
        *split_rows(given.cluster, given.found, given.inputs),
        *sync_rows(given.inputs, given.cluster, apart, CONSTANTS),
        *async_rows(given.cluster, apart),
    ]


def topology_table(given: Answer) -> Table:
    """Rows of the table of topologies: a label, and one cell per topology. The first has names."""
    plans = list(given.found.topologies.values())
    rows = [("", [plan.name for plan in plans]), ("devices", [_devices(plan) for plan in plans])]
    for name, _ in plans[0].phases.items():
        if name != "verifier":
            rows.append((name, [f"{getattr(plan.phases, name):.2f}" for plan in plans]))
    rows.append(("step", [f"{plan.step.seconds:.2f}" for plan in plans]))
    rows.append(("sampler waits", [f"{_wait(plan, plan.step.sampler_idle):.2f}" for plan in plans]))
    rows.append(("trainer waits", [f"{_wait(plan, plan.step.trainer_idle):.2f}" for plan in plans]))
    rows.append(("tokens/s", [f"{tokens_per_second(given, plan):,.0f}" for plan in plans]))
    return rows


def _wait(plan: TopologyPlan, idle: float) -> float:
    """Idle seconds of a pool. Colocated roles take turns: no device waits."""
    return 0.0 if plan.name == COLOCATED else max(0.0, idle)


def _devices(plan: TopologyPlan) -> str:
    if plan.name in OWN:
        return str(plan.training_devices)
    return f"{plan.sampling_devices} + {plan.training_devices}"


def tokens_per_second(given: Answer, plan: TopologyPlan) -> float:
    """Sampled tokens per second in a topology."""
    work = given.inputs.work
    return useful_tokens_per_second(
        prompts=work.prompts,
        samples=work.samples,
        mean_length=work.mean_tokens,
        keep_rate=1.0,
        seconds=plan.step.seconds,
    )


def cost_rows(given: Answer) -> Rows:
    """Time and price of the whole run, if Sixfold runs it."""
    plan, device = given.running, given.cluster.device
    if given.untimed:
        return [("run", f"not predicted: {given.untimed}")]
    if plan is None:
        return [("run", "Sixfold cannot run this: see the first lines")]
    label = {WITH_SETTINGS: "with the settings above", UNKNOWN: "if it fits"}
    rows = [(label.get(given.verdict.kind, "run"), cost(given, plan))]
    if device.price_per_hour is not None:
        price = f"{device.price_per_hour:g} US dollars per device and hour"
        rows.append(("price", f"{price} ({one_line(device.price_source)})"))
    return rows


def duration(hours: float) -> str:
    """`8.3 hours`, days from 48 hours, or minutes below 0.1 hours."""
    if hours < 0.1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def cost(given: Answer, plan: TopologyPlan) -> str:
    """Time and price of the run with such steps."""
    steps = given.inputs.plan.recipe.run.steps
    per_day = f"{24 * plan.step.steps_per_hour:,.0f} steps a day"
    text = f"{steps:,} steps in {duration(given.hours(plan))}; {per_day}"
    price = given.price(plan)
    return text if price is None else f"{text}; {price:,.2f} US dollars"
