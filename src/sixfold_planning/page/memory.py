"""Memory by role for `sixfold plan`: one set of devices, and two pools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sixfold.recipe.explain.memory import adding_up, gigabytes
from sixfold.recipe.memory import (
    Settings,
    Together,
    memory_of,
    possible,
    saving_path,
    settings_together,
    what_helps,
)
from sixfold.recipe.plan import Plan
from sixfold.sizing.memory import CACHE, MemoryPlan

from ..hardware import Accelerator
from ..planned_work import Inputs
from ..planner import TopologyPlan
from ..pools import METHODS, POOLS, bytes_per_device, model_copies, pool_fit
from .layout import Rows

ADAPTER: Settings = {"model.lora.rank": 32}
"""Tried where training of all weights does not fit."""


@dataclass(frozen=True)
class SharedMemory:
    """Memory of devices on which all roles take turns: the exact plan of `sixfold explain`.

    It depends on neither the accelerator nor the mean length.

    Attributes:
        ranks: number of devices.
    """

    plan: Plan
    ranks: int

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """Memory of each device. None: the plan does not apply."""
        return memory_of(self.plan, self.ranks)

    @cached_property
    def helps(self) -> str:
        """Settings that would save memory, with the largest saving first."""
        assert self.memory is not None
        found = what_helps(self.plan, self.memory, self.ranks)
        return "; ".join(f"{name} ({gigabytes(size)} less)" for name, size in found)

    @cached_property
    def path(self) -> list[Together]:
        """Settings that save memory together, from none to all."""
        return saving_path(self.plan, self.ranks)

    def with_adapter(self, total: int) -> Together | None:
        """Settings with which an adapter fits instead of all weights. None: it does not fit."""
        if self.plan.recipe.model.lora.rank:
            return None
        adapter = replace(self.plan, recipe=self.plan.recipe.with_settings(ADAPTER))
        found = settings_together(saving_path(adapter, self.ranks), total, self.ranks)
        if found is None or not possible(found.plan.recipe, self.ranks):
            return None
        return replace(found, settings={**ADAPTER, **found.settings})


def shared_rows(shared: SharedMemory, device: Accelerator) -> tuple[Rows, bool | None]:
    """Memory of one device on which all roles take turns.

    Returns:
        The rows, and whether the run fits. None: the plan does not apply.
    """
    memory = shared.memory
    if memory is None:
        return [("memory", "not known: sizes of the model or its reference are missing")], None
    least = memory.cache_least
    phase, parts = memory.peak_parts(least)
    sizes, needed = adding_up([part.size for part in parts])
    names = [f"{part.name}, {least:,} tokens" * (part.name == CACHE) or part.name for part in parts]
    rows = list(zip(names, sizes, strict=True))
    total = round(device.memory_gb * 1e9)
    fits = memory.cache_that_fits(total)
    rows.append(
        (
            "needed at least",
            f"{needed} of {gigabytes(total)}, a tenth is kept free: the sum while {phase}",
        )
    )
    others = [part for part in memory.parts if part.size and part not in parts]
    if others:
        shown = ", ".join(
            f"{part.name} {gigabytes(part.size)}" + " (in host memory)" * part.host
            for part in others
        )
        rows.append(("at other times", shown))
    if memory.cache_wanted > least:
        cache = gigabytes(memory.cache_wanted * memory.cache_token)
        rows.append(("KV cache at most", f"{cache}, {memory.cache_wanted:,} tokens"))
    if fits is None:
        excess = memory.needed(least) - round(0.9 * total)
        rows.append(("verdict", f"does not fit: {gigabytes(excess)} too much"))
        rows.append(("would help, each alone", shared.helps or "no setting"))
        return rows, False
    says = "fits"
    if memory.cache_wanted and fits < memory.cache_wanted and memory.sequence:
        says = f"fits, with {fits // memory.sequence} full-length sequences at a time"
    rows.append(("verdict", says))
    return rows, True


def pool_rows(
    inputs: Inputs, device: Accelerator, topology: TopologyPlan
) -> tuple[Rows, bool | None]:
    """Memory per device of a trainer and a sampler that have their own devices.

    Returns:
        The rows, and whether both pools fit. None: the estimate does not apply.
    """
    chunk = inputs.plan.recipe.trainer.logprob_chunk
    fit = pool_fit(inputs.arch, device, topology, inputs.work, chunk=chunk)
    if inputs.work.adapters:
        return [("note", "this estimate is for training of all weights, not for adapters")], None
    trainer = [("state", fit.state), ("activations", fit.activations)]
    trainer += [("logits", fit.logits), ("reference", fit.reference)]
    stage = "no ZeRO stage is enough" if fit.zero_stage is None else f"ZeRO {fit.zero_stage} is"
    if fit.zero_stage is not None:
        stage += " enough" if fit.zero_stage == 3 else " enough; this estimate uses ZeRO 3"
    rows = [
        (
            f"trainer, {topology.training_devices}",
            _sum([part for part in trainer if part[1]])
            + f"; {_verdict(fit.trainer_fits, fit.trainer, fit.room)}; {stage}",
        ),
        (
            f"sampler, {topology.sampling_devices}",
            f"weights {gigabytes(round(fit.engine_weights))}; the KV caches have room for"
            f" {fit.cache_room:,} tokens, and a step needs {fit.cached:,};"
            f" {'fits' if fit.sampler_fits else 'does not fit'}",
        ),
        ("at least", f"{fit.least_devices} devices hold the training state"),
    ]
    return rows, fit.trainer_fits and fit.sampler_fits


def _sum(parts: list[tuple[str, float]]) -> str:
    """`a 1.0 GB + b 2.0 GB = 3.0 GB`."""
    sizes, total = adding_up([round(size) for _, size in parts])
    shown = [f"{name} {size}" for (name, _), size in zip(parts, sizes, strict=True)]
    return f"{' + '.join(shown)} = {total}"


def _verdict(fits: bool, size: float, room: float) -> str:
    return "fits" if fits else f"does not fit: {gigabytes(round(size - room))} too much"


def copy_rows(inputs: Inputs, topology: TopologyPlan) -> Rows:
    """Copies of the weights that the method keeps, and their bytes per device."""
    method = "ppo" if inputs.work.critic else "grpo"
    copies = model_copies(method, optional=(), asynchronous=topology.name == "async")
    if not inputs.work.reference:
        copies = tuple(copy for copy in copies if copy.role != "reference")
    if inputs.work.critic:  # verifiers replace the reward model
        copies = tuple(copy for copy in copies if copy.role != "reward")
    # One engine replica holds all weights; the reference is on the trainer's devices.
    devices = dict.fromkeys(POOLS, topology.training_devices) | {
        "rollout": topology.sampling_devices
    }
    sizes = bytes_per_device(copies, inputs.arch.params_b * 1e9, devices)
    low, high = METHODS[method].models
    roles = ", ".join(copy.role for copy in copies)
    shown = ", ".join(f"{pool} {gigabytes(round(size))}" for pool, size in sizes.items())
    models = f"{low}" if low == high else f"{low} to {high}"
    return [
        ("copies", f"{roles} ({method} usually has {models} models)"),
        ("sharded evenly", f"{shown} per device"),
    ]
