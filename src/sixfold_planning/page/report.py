"""`sixfold plan TARGET`: will it fit, how fast, what limits it, what does it cost. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean as mean

from ..constants import CONSTANTS
from ..hardware import Cluster
from ..samplers import TooLarge
from .advice import group_rows, sensitivity_rows
from .answer import (
    POOLS_TITLE,
    TOPOLOGIES_TITLE,
    TWO_POOLS_TITLE,
    accuracy,
    all_limit_rows,
    answer,
    cost,
    cost_rows,
    memory_title,
    title,
    topology_table,
    two_pool_rows,
    work_rows,
)
from .inputs import rates_of, read_inputs
from .layout import print_section, print_table, print_text
from .memory import SharedMemory
from .record import plan_record, simulation_record, verdict_record
from .simulation import SimulationRequest, print_simulation, simulate, simulated_groups
from .verdict import CANNOT, EXIT_CODES, remedy, verdict_of


def plan_report(
    target: str,
    settings: Sequence[str],
    cluster: Cluster,
    *,
    mean_tokens: float | None,
    check_s: float,
    pass_rate: float | None,
    variation: float,
    simulation: SimulationRequest | None,
    as_json: bool,
) -> int:
    """Print one page about a recipe or a model on given devices.

    Args:
        target: recipe or model, as for `read_inputs`.
        settings: flags that change the recipe.
        mean_tokens: mean length of completions. None: as for `read_inputs`.
        check_s: seconds of a reward check after the last token. 0: it hides behind sampling.
        pass_rate: share of correct samples. None: that of the recipe's profile, or 0.5.
        variation: coefficient of variation of the lengths in a group.
        simulation: what to simulate. None: nothing.

    Returns:
        The exit code: 0 if Sixfold runs this, else another one of `EXIT_CODES`.

    Raises:
        UserError: if the target is unknown.
    """
    inputs = replace(read_inputs(target, settings, mean_tokens=mean_tokens), check_s=check_s)
    rates = rates_of(inputs, pass_rate)
    if simulation is not None:
        groups = simulated_groups(inputs, simulation, variation=variation, pass_rate=mean(rates))
    shared = SharedMemory(inputs.plan, cluster.count)
    try:
        given = answer(inputs, cluster, shared)
    except TooLarge:
        verdict = verdict_of(inputs, cluster, shared)
        if verdict.kind != CANNOT:
            raise  # the weights fit in a form that the model of time does not know
        hint = remedy(verdict, cluster, shared)
        if as_json:
            print(json.dumps({"verdict": verdict_record(verdict, hint)}, indent=1))
        else:
            print_text(f"{verdict.text} {hint}")
        return EXIT_CODES[verdict.kind]
    code, hint = EXIT_CODES[given.verdict.kind], remedy(given.verdict, cluster, shared)
    if as_json:
        record = plan_record(given, hint, rates=rates, variation=variation)
        if simulation is not None:
            result = simulate(inputs, cluster, CONSTANTS, simulation, groups)
            record["simulation"] = simulation_record(result)
        print(json.dumps(record, indent=1, allow_nan=False))
        return code
    print_text(f"{given.verdict.text} {hint}")
    if (running := given.running) is not None:
        print_text(f"A step takes {running.step.seconds:.2f} s: {cost(given, running)}.")
    print()
    print_text(f"{title(given)}. Nothing was started or loaded. {accuracy(cluster)}")
    print_section("Work of a step", work_rows(inputs))
    print_section(memory_title(given), given.memory)
    print_section(POOLS_TITLE, given.pools)
    print_table(TOPOLOGIES_TITLE, topology_table(given))
    print_section("What limits it", all_limit_rows(given))
    print_section("Groups", group_rows(inputs, rates, variation))
    print_section(TWO_POOLS_TITLE, two_pool_rows(given))
    print_section(
        "Seconds of a colocated step if one assumption is worse by a third",
        sensitivity_rows(inputs, cluster, CONSTANTS, given.together),
    )
    print_section("Time and cost", cost_rows(given))
    if simulation is not None:
        print_simulation(simulate(inputs, cluster, CONSTANTS, simulation, groups))
    return code
