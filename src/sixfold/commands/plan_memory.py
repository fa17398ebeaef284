"""Memory by role for `sixfold plan`: one set of devices, and two pools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..planning.activations import CHECKPOINTING
from ..planning.hardware import Accelerator
from ..planning.model_copies import METHODS, POOLS, bytes_per_device, model_copies
from ..planning.planner import TopologyPlan
from ..planning.pools import PoolFit, pool_fit
from ..recipe.memory import MemoryPlan
from ..recipe.memory_text import gigabytes, memory_of, what_helps
from ..recipe.plan import Plan
from ..run.planned_work import Inputs
from .plan_layout import Rows


@dataclass(frozen=True)
class SharedMemory:
    """Memory of devices on which all roles take turns: the exact plan of `sixfold explain`.

    It depends on neither the accelerator nor the mean length.

    Attributes:
        plan: the resolved recipe.
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


def shared_rows(shared: SharedMemory, device: Accelerator) -> tuple[Rows, bool | None]:
    """Memory of one device on which all roles take turns.

    Returns:
        The rows, and whether the run fits. None: the plan does not apply.
    """
    memory = shared.memory
    if memory is None:
        return [("memory", "not known: sizes of the model or its reference are missing")], None
    rows = [(part.name, gigabytes(part.size)) for part in memory.parts if part.size]
    cache = memory.cache_wanted * memory.cache_token
    if cache:
        rows.append(
            (
                "KV cache",
                f"{gigabytes(cache)}, {memory.cache_wanted:,} tokens",
            )
        )
    total = round(device.memory_gb * 1e9)
    fits = memory.cache_that_fits(total)
    least = memory.needed(memory.cache_least)
    rows.append(
        ("needed at least", f"{gigabytes(least)} of {gigabytes(total)}, a tenth is kept free")
    )
    if fits is None:
        rows.append(("verdict", f"does not fit: {gigabytes(least - round(0.9 * total))} too much"))
        rows.append(("would help", shared.helps or "no setting alone: use a smaller model"))
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
    memory = fit.memory
    if inputs.work.adapters:
        return [("note", "this estimate is for training of all weights, not for adapters")], None
    trainer = [("state", memory.state), ("activations", memory.activations)]
    trainer += [("logits", fit.logits), ("reference", memory.reference)]
    stage = "no ZeRO stage is enough" if fit.zero_stage is None else f"ZeRO {fit.zero_stage} is"
    if fit.zero_stage is not None:
        stage += " enough" if fit.zero_stage == 3 else " enough; this estimate uses ZeRO 3"
    rows = [
        (
            f"trainer, {topology.training_devices}",
            _sum(trainer, fit.trainer)
            + f"; {_verdict(fit.trainer_fits, fit.trainer, fit.room)}; {stage}",
        ),
        (
            f"sampler, {topology.sampling_devices}",
            f"weights {gigabytes(round(memory.engine_weights))}, KV cache for"
            f" {fit.cache_room:,} of {fit.cached:,} tokens;"
            f" {'fits' if fit.sampler_fits else 'does not fit'}",
        ),
        ("at least", f"{fit.least_devices} devices hold the training state"),
    ]
    if not fit.trainer_fits:
        rows.append(("would help", _pool_help(inputs, fit)))
    return rows, fit.trainer_fits and fit.sampler_fits


def _sum(parts: list[tuple[str, float]], total: float) -> str:
    shown = " + ".join(f"{name} {gigabytes(round(size))}" for name, size in parts if size)
    return f"{shown} = {gigabytes(round(total))}"


def _verdict(fits: bool, size: float, room: float) -> str:
    return "fits" if fits else f"does not fit: {gigabytes(round(size - room))} too much"


def _pool_help(inputs: Inputs, fit: PoolFit) -> str:
    found = []
    if fit.memory.state > fit.room / 2:
        found.append(f"more devices ({gigabytes(round(fit.memory.state))} is training state)")
    full = CHECKPOINTING["full"]
    if inputs.work.recompute != "full":
        found.append(
            "trainer.activation_checkpointing = 'full' (activations about"
            f" {full.memory:.0%}, FLOPs + {full.compute:.0%})"
        )
    found.append("a smaller trainer.max_tokens_per_microbatch")
    return "; ".join(found)


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
