"""`sixfold plan TARGET`: will it fit, how fast, what limits it, what does it cost. No torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from ..planning.constants import CONSTANTS
from ..planning.hardware import Cluster
from .plan_advice import group_rows, sensitivity_rows
from .plan_answer import (
    accuracy,
    all_limit_rows,
    answer,
    cost_rows,
    memory_title,
    title,
    topology_table,
    two_pool_rows,
    work_rows,
)
from .plan_inputs import read_inputs
from .plan_layout import WIDTH, print_section, print_table
from .plan_record import plan_record, simulation_record
from .plan_simulation import SimulationRequest, print_simulation, simulate, simulated_groups


def plan_report(
    target: str,
    settings: Sequence[str],
    cluster: Cluster,
    *,
    mean_tokens: float | None,
    pass_rate: float,
    variation: float,
    simulation: SimulationRequest | None,
    as_json: bool,
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
        as_json: print the numbers as one JSON object.

    Raises:
        UserError: if the target is unknown, or the devices cannot hold the model's weights.
    """
    inputs = read_inputs(target, settings, mean_tokens=mean_tokens)
    if simulation is not None:
        groups = simulated_groups(inputs, simulation, variation=variation, pass_rate=pass_rate)
    given = answer(inputs, cluster)
    if as_json:
        record = plan_record(given, pass_rate=pass_rate, variation=variation)
        if simulation is not None:
            result = simulate(inputs, cluster, CONSTANTS, simulation, groups)
            record["simulation"] = simulation_record(result)
        print(json.dumps(record, indent=1, allow_nan=False))
        return 0
    print(f"{title(given)}. Nothing was started or loaded.")
    print(textwrap.fill(accuracy(cluster), WIDTH))
    print_section("Work of a step", work_rows(inputs))
    print_section(memory_title(given), given.memory)
    print_section("Memory per device with two pools (estimate)", given.pools)
    print_table("Seconds of a step (estimate)", topology_table(given))
    print_section("What limits it", all_limit_rows(given))
    print_section("Groups", group_rows(inputs, pass_rate, variation))
    print_section("Two pools", two_pool_rows(given))
    print_section(
        "Seconds of a colocated step if one assumption is worse by a third",
        sensitivity_rows(inputs, cluster, CONSTANTS),
    )
    print_section("Time and cost", cost_rows(given))
    if simulation is not None:
        print_simulation(simulate(inputs, cluster, CONSTANTS, simulation, groups))
    return 0
