"""`sixfold plan TARGET --solve`: recipe lines that fit and are fastest, or what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sixfold.recipe.dump import toml_tables
from sixfold.recipe.explain.memory import gigabytes

from ..hardware import Cluster
from ..solver import Candidate, Search
from .answer import accuracy
from .inputs import read_inputs
from .layout import Table, print_table, print_text
from .verdict import CANNOT, EXIT_CODES, RUNS

COLUMNS = 5
"""Candidates in the table: as many as have room."""


def solve_report(
    target: str,
    settings: Sequence[str],
    cluster: Cluster,
    *,
    mean_tokens: float | None,
    as_json: bool,
) -> int:
    """Print the best candidates, and the recipe lines of the best that runs or why none does.

    Args:
        target: recipe or model, as for `read_inputs`.
        settings: flags that change the recipe.
        mean_tokens: mean length of completions. None: half of the bound.

    Returns:
        The exit code: 0 if there are such lines, else 1.

    Raises:
        UserError: if the target is unknown, or its memory cannot be computed.
    """
    search = Search(read_inputs(target, settings, mean_tokens=mean_tokens), cluster)
    best = next((one for one in search.found if one.runs), None)
    reason = "" if best else missing(search, cluster)
    code = EXIT_CODES[RUNS if best else CANNOT]
    if as_json:
        record = {
            "candidates": [candidate_record(one) for one in search.found],
            "settings": None if best is None else dict(best.settings),
            "toml": None if best is None else toml_tables(best.settings),
            "command": None if best is None else command(best),
            "reason": reason or None,
        }
        print(json.dumps(record, indent=1, allow_nan=False))
        return code
    print_table("Candidates, the best of each topology", _table(search))
    print()
    if best is None:
        print_text(reason)
        return code
    says = "The recipe fits as it is" if not best.settings else "Lines for the recipe"
    print_text(
        f"{says}: a step of {best.step.seconds:.3g} s. {accuracy(cluster)}"
        + " Last resorts are among them: they move data to the host, which takes longer than this,"
        " or change numbers." * bool(best.resorts)
    )
    if best.settings:
        print(f"\n{toml_tables(best.settings)}", end="")
    print(f"\n{command(best)}")
    return code


def command(one: Candidate) -> str:
    """How the run starts."""
    split = one.split
    if split.training == 1:
        return "sixfold train RECIPE"
    machines = f" --nnodes {split.nodes}" if split.nodes > 1 else ""
    return f"torchrun{machines} --nproc-per-node {split.ranks} -m sixfold train RECIPE"


def missing(search: Search, cluster: Cluster) -> str:
    """Why nothing runs: what overflows in the nearest candidate, and what would make one fit."""
    devices = f"{cluster.count} x {cluster.device.name}"
    says = f"Nothing that Sixfold runs fits on {devices}."
    nearest = next((one for one in search.found if not one.refused), None)
    if nearest is not None:
        at, need = max(
            ("trains", nearest.trainer), ("samples", nearest.sampler), key=lambda two: two[1].size
        )
        parts = sorted(need.parts, key=lambda part: -part.size)[:3]
        held = ", ".join(f"{part.name} {gigabytes(part.size)}" for part in parts)
        says += (
            f" The nearest is {nearest.topology.name} ({_who(nearest)}): a device that {at} needs"
            f" {gigabytes(need.size)} and may use {gigabytes(search.room)},"
            f" {gigabytes(nearest.excess)} too much. It holds {held} and more."
        )
    other = next((one for one in search.found if one.refused and one.excess <= 0), None)
    if other is None:
        return f"{says} Nothing that the search knows would: use more devices, or a smaller model."
    wants = "; ".join(reason.rstrip(".") for reason in other.refused)
    return (
        f"{says} {other.topology.name} ({_who(other)}) would fit, at {other.step.seconds:.3g} s a"
        f" step, but: {wants}."
    )


def _who(one: Candidate) -> str:
    split = one.split
    ranks = f"{split.training} rank{'s' * (split.training > 1)}"
    if not split.tensor:
        return f"{ranks} train and sample"
    samplers = f"{split.engines} sampler{'s' * (split.engines > 1)}"
    return f"{ranks} for training, {samplers} of {split.tensor} GPU{'s' * (split.tensor > 1)}"


def _table(search: Search) -> Table:
    shown = list({(one.topology.name, one.ahead): one for one in reversed(search.found)}.values())
    shown = sorted(shown, key=lambda one: one.preference)[:COLUMNS]
    room = f"GB of {search.room / 1e9:.1f}"

    def row(label: str, cell: Any) -> tuple[str, list[str]]:
        return label, [cell(one) for one in shown]

    return [
        row("", lambda one: one.topology.name),
        row("fits", lambda one: "no" if one.excess > 0 else "yes"),
        row("Sixfold has it", lambda one: "no" if one.refused else "yes"),
        row("devices that train", lambda one: f"{one.split.training}"),
        row("devices that sample", lambda one: f"{one.split.sampling or 'the same'}"),
        row("devices of a sampler", lambda one: f"{one.split.tensor or 1}"),
        row("steps ahead", lambda one: f"{int(one.ahead)}"),
        row(f"trainer, {room}", lambda one: f"{one.trainer.size / 1e9:.1f}"),
        row(f"sampler, {room}", lambda one: f"{one.sampler.size / 1e9:.1f}"),
        row("step, seconds", lambda one: f"{one.step.seconds:.3g}"),
        row("bound by", lambda one: one.bound),
        row("lines", lambda one: f"{len(one.settings)}"),
    ]


def candidate_record(one: Candidate) -> dict[str, Any]:
    """A candidate with exact numbers: bytes, and seconds."""
    split = one.split
    return {
        "topology": one.topology.name,
        "fits": one.excess <= 0,
        "refused": list(one.refused),
        "machines": split.nodes,
        "training_devices": split.training,
        "sampling_devices": split.sampling or split.training,
        "devices_per_sampler": split.tensor or 1,
        "staleness": int(one.ahead),
        "trainer_bytes": one.trainer.size,
        "sampler_bytes": one.sampler.size,
        "kv_tokens": one.sampler.tokens,
        "phases": dict(one.phases.items()),
        "step": one.step.seconds,
        "bound": one.bound,
        "settings": dict(one.settings),
    }
