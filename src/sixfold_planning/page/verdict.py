"""Whether Sixfold runs a plan: as given, with other settings, or not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from sixfold.errors import UserError
from sixfold.recipe.dump import toml_literal
from sixfold.recipe.explain.memory import gigabytes
from sixfold.recipe.memory import Settings, settings_together
from sixfold.recipe.rank_checks import check_ranks
from sixfold.sizing.memory import MemoryPlan

from ..hardware import Cluster
from ..planned_work import Inputs, with_recipe
from .memory import SharedMemory

RUNS, WITH_SETTINGS, CANNOT, UNKNOWN = "runs", "with settings", "cannot", "not known"
EXIT_CODES = {RUNS: 0, CANNOT: 1, WITH_SETTINGS: 4, UNKNOWN: 5}
"""Exit codes of `sixfold plan`. 2 and 3 are those of every verb."""

HELD = {
    "engine's weights": "a whole copy of the weights for its engine",
    "sync copy": "a float32 sync copy",
}
"""Names of parts in a sentence."""


@dataclass(frozen=True)
class Verdict:
    """Whether Sixfold runs a plan.

    Attributes:
        kind: a key of `EXIT_CODES`.
        text: the verdict with its reason, as sentences.
        settings: settings with which it runs. Empty for other verdicts.
        inputs: the question with these settings. None: Sixfold cannot run it.
    """

    kind: str
    text: str
    settings: Settings = field(default_factory=dict)
    inputs: Inputs | None = None


def verdict_of(inputs: Inputs, cluster: Cluster, shared: SharedMemory) -> Verdict:
    """Judge a plan by what devices and ranks support, and by its memory."""
    plan, memory = inputs.plan, shared.memory
    try:
        check_ranks(plan.recipe, plan.algorithm, cluster.count)
    except UserError as error:
        return _cannot(str(error))
    if cluster.device.name.startswith("TPU"):
        return _cannot("it does not run on TPUs")
    if memory is None:
        return Verdict(
            UNKNOWN,
            "It is not known whether Sixfold runs this: sizes of the model or its reference are"
            " missing, so its memory cannot be computed.",
            inputs=inputs,
        )
    total = round(cluster.device.memory_gb * 1e9)
    room = f"may use {gigabytes(round(0.9 * total))} (a tenth of {gigabytes(total)} is kept free)"
    if memory.cache_that_fits(total) is not None:
        text = f"Sixfold runs this. Each device needs at least {_least(memory)} and {room}."
        return Verdict(RUNS, text, inputs=inputs)
    found = settings_together(shared.path, total, cluster.count)
    if found is not None:
        text = (
            f"Sixfold runs it with these settings together: {_flags(found.settings)}. Each device"
            f" then needs at least {_least(found.memory)} instead of {_least(memory)}, and {room}."
        )
        if any("offload" in key for key in found.settings):
            text += " A step then takes longer than estimated: data moves to the host and back."
        changed = with_recipe(inputs, found.plan.recipe)
        return Verdict(WITH_SETTINGS, text, found.settings, changed)
    parts = sorted(memory.peak_parts(memory.cache_least)[1], key=lambda part: -part.size)
    held = [f"{HELD.get(part.name, part.name)} ({gigabytes(part.size)})" for part in parts[:3]]
    return _cannot(
        f"each device needs {_least(memory)} and {room}:"
        f" {'each rank' if cluster.count > 1 else 'the device'} holds {', '.join(held)} and more"
    )


def _cannot(reason: str) -> Verdict:
    return Verdict(CANNOT, f"Sixfold cannot run this, because {reason.rstrip('.')}.")


def remedy(verdict: Verdict, cluster: Cluster, shared: SharedMemory) -> str:
    """What is left to do about a plan that does not fit. "" for other verdicts.

    Args:
        shared: memory of these devices with all roles on them.
    """
    total, path = round(cluster.device.memory_gb * 1e9), shared.path
    if verdict.kind != CANNOT or not path or path[0].fits(total):
        return ""
    says = "No setting saves memory."
    if (last := path[-1]).settings:
        says = (
            f"With {_flags(last.settings)}, all settings that save memory, it still needs"
            f" {_least(last.memory)}."
        )
    adapter = shared.with_adapter(total)
    if adapter is not None:
        return f"{says} An adapter would fit: {_flags(adapter.settings)}."
    return f"{says} Use a smaller model, or devices with more memory."


def _least(memory: MemoryPlan) -> str:
    return gigabytes(memory.needed(memory.cache_least))


def _flags(settings: Settings) -> str:
    return " ".join(
        f"--{key} {value if isinstance(value, str) else toml_literal(value)}"
        for key, value in settings.items()
    )
