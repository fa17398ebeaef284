"""GPU memory of a run as text for `sixfold explain`. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...sizing.held import Part
from ...sizing.memory import MemoryPlan
from ..memory import memory_of, ranks_of, teacher_parameters, what_helps
from ..plan import Plan
from ..schema import RayPlacement

CARDS = (24, 40, 80)
"""Sizes of the GPUs that every plan is compared with, in GB (10^9 bytes)."""
_QUERY = ("--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_UNKNOWN = "not known: the sizes of this model cannot be read before it is loaded"
_NOT_HERE = "not known: config.json of {name} is not in the hub's cache"
_DOWNLOAD = "get it, without the weights: hf download {name} config.json"


@dataclass(frozen=True)
class Device:
    """A GPU of this machine."""

    index: int
    free: int
    total: int


def memory_lines(plan: Plan) -> list[tuple[str, str]]:
    """Lines about each part, the sum, the GPUs on which it fits, and what helps.

    Returns:
        (statement, reason) pairs.
    """
    memory = memory_of(plan)
    if memory is None:
        return [_missing(plan)]
    lines = [
        (f"{p.name}{_when(p)}: {gigabytes(p.size)}", p.formula) for p in memory.parts if p.size
    ]
    if (ranks := ranks_of(placement := plan.recipe.placement)) > 1:
        by_ray = isinstance(placement, RayPlacement)
        says = f"on each of {ranks} GPUs, as {'Ray' if by_ray else 'torchrun'} starts ranks"
        why = "placement.ranks" if by_ray else "WORLD_SIZE"
        if (group := plan.recipe.parallel.context) > 1:
            says += f"; {group} of them compute the positions of a micro-batch together"
            why += ", parallel.context"
        lines.insert(0, (says, why))
    cache = memory.cache_wanted * memory.cache_token
    if memory.cache_wanted:
        how = f"{memory.cache_wanted:,} tokens x {memory.cache_token:,} bytes"
        lines.append(
            (
                f"KV cache: {gigabytes(cache)}",
                how + ("" if plan.recipe.engine.kv_tokens else "; on a GPU less, if less fits"),
            )
        )
    peak = memory.needed(memory.cache_wanted)
    phase, _ = memory.peak_parts(memory.cache_wanted)
    why = (
        f"the larger of training and sampling; here {phase}. engine.release_kv ="
        f" {str(plan.recipe.engine.release_kv).lower()}"
    )
    lines.append((f"at the peak: {gigabytes(peak)}, and a tenth of the GPU as headroom", why))
    if memory.host:
        lines.append((f"in host memory: {gigabytes(memory.host)}", "not on the GPU"))
    lines.append((_cards(memory), "GB of 10^9 bytes; nothing else may run on the GPU"))
    if not plan.recipe.engine_here:
        backend = plan.recipe.rollout.backend.kind
        why = f"rollout.backend.kind = {backend} has a process of its own"
        if backend == "engine":
            why = "placement.devices: they are on other GPUs"
        lines.append(("weights and caches of samplers are not counted", why))
    devices = [] if plan.recipe.run.device == "cpu" else find_devices()
    device = _chosen(plan.recipe.run.device, devices)
    if device is not None:
        lines.append((_here(memory, device), "free memory as nvidia-smi states it"))
    total, free = (device.total, device.free) if device else (CARDS[0] * 10**9, CARDS[0] * 10**9)
    if memory.cache_that_fits(total, free) is None:
        helps = [
            f"{setting} ({gigabytes(saved)} less)" for setting, saved in what_helps(plan, memory)
        ]
        where = f"GPU {device.index}" if device else f"{CARDS[0]} GB"
        lines.append(
            (
                f"to fit on {where}: "
                + (", ".join(helps) or "no setting helps; use a smaller model"),
                "",
            )
        )
    return lines


def _when(part: Part) -> str:
    """Where or when a part exists, unless it is always on the GPU."""
    if part.host:
        return ", in host memory"
    return (
        ""
        if part.trains and part.samples
        else (", while training" if part.trains else ", while sampling")
    )


def _missing(plan: Plan) -> tuple[str, str]:
    """(statement, remedy) about a memory plan that cannot be made."""
    if plan.model.unknown:
        return f"not known before the model is loaded: {plan.model.unknown}", ""
    named = [plan.recipe.model.path] if plan.model.parameters is None else []
    if teacher_parameters(plan.recipe.model, plan.recipe.reference.path) is None:
        named.append(plan.recipe.reference.path)
    name = next((n for n in named if n and not Path(n).expanduser().is_dir()), "")
    if not name:
        return _UNKNOWN, ""
    return _NOT_HERE.format(name=name), _DOWNLOAD.format(name=name)


def _cards(memory: MemoryPlan) -> str:
    return "; ".join(f"{card} GB: {_verdict(memory, card * 10**9, card * 10**9)}" for card in CARDS)


def _here(memory: MemoryPlan, device: Device) -> str:
    return (
        f"GPU {device.index}, {gigabytes(device.free)} of {gigabytes(device.total)} free:"
        f" {_verdict(memory, device.total, device.free)}"
    )


def _verdict(memory: MemoryPlan, total: int, free: int) -> str:
    fits = memory.cache_that_fits(total, free)
    if fits is None:
        return "does not fit"
    if fits == memory.cache_wanted or not memory.sequence:
        return "fits"
    return (
        f"fits, with room for {fits // memory.sequence} of {memory.cache_wanted // memory.sequence}"
        " full-length sequences at a time"
    )


def _chosen(device: str, devices: list[Device]) -> Device | None:
    """GPU that the run would use, or None.

    `cuda:N` counts the GPUs that CUDA_VISIBLE_DEVICES leaves; nvidia-smi lists all of them.
    """
    number = device.partition(":")[2]
    wanted = int(number) if number else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = visible.split(",")
        if wanted >= len(names) or not names[wanted].strip().isdigit():
            return None
        wanted = int(names[wanted])
    return next((d for d in devices if d.index == wanted), None)


def find_devices() -> list[Device]:
    """GPUs that nvidia-smi lists.

    Empty if nvidia-smi is missing, fails, or takes longer than two seconds.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, *_QUERY], capture_output=True, text=True, timeout=2, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_devices(done.stdout)


def parse_devices(listing: str) -> list[Device]:
    """Parse the output of nvidia-smi: index, free MiB and total MiB, one GPU per line.

    Lines in another form are skipped.
    """
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and all(field.isascii() and field.isdigit() for field in fields):
            index, free, total = map(int, fields)
            found.append(Device(index, free * _MIB, total * _MIB))
    return found


def gigabytes(size: int) -> str:
    """Size in GB (10^9 bytes), or in MB if it is below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"


def adding_up(sizes: Sequence[int]) -> tuple[list[str], str]:
    """Sizes and their sum in one unit, rounded so that what is shown adds up.

    Those with the largest remainders are rounded up.
    """
    total = sum(sizes)
    unit, name = (10**8, "GB") if total >= 10**9 else (10**5, "MB")
    tenths = [size // unit for size in sizes]
    missing = round(total / unit) - sum(tenths)
    for place in sorted(range(len(sizes)), key=lambda i: -(sizes[i] % unit))[:missing]:
        tenths[place] += 1
    return [f"{number / 10:.1f} {name}" for number in tenths], f"{total / unit / 10:.1f} {name}"
