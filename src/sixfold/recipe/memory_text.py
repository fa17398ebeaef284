"""GPU memory of a run as text for `sixfold explain`. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from .algorithm_plan import resolve_algorithm
from .lora_plan import check_lora
from .memory import MemoryPlan, memory_plan
from .memory_shards import ranks_started
from .plan import ModelShape, Plan, model_shape
from .schema import ParallelConfig, Recipe, SharedSyncConfig

CARDS = (24, 40, 80)
"""Sizes of the GPUs that every plan is compared with, in GB (10^9 bytes)."""
_QUERY = ("--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_UNKNOWN = "not known: the sizes of this model cannot be read before it is loaded"
_NOT_HERE = "not known: config.json of {name} is not in the hub's cache"
_DOWNLOAD = "get it, without the weights: hf download {name} config.json"


@dataclass(frozen=True)
class Device:
    """A GPU of this machine.

    Attributes:
        index: number of the GPU.
        free: free bytes.
        total: bytes in total.
    """

    index: int
    free: int
    total: int


def memory_of(plan: Plan, ranks: int = 0) -> MemoryPlan | None:
    """Memory of the plan. None if the model's sizes are not known.

    Args:
        plan: the resolved recipe.
        ranks: processes that torchrun starts. 0: those of this run.
    """
    size, teacher, speculation = (
        plan.model.size,
        _teacher(plan.recipe),
        plan.recipe.engine.speculation,
    )
    draft = None
    if speculation.kind == "draft":
        draft = _shape_of(plan.recipe, speculation.path, "engine.speculation.path").size
    if size is None or teacher is None or (speculation.kind == "draft" and draft is None):
        return None
    return memory_plan(
        plan.recipe,
        size,
        plan.max_prompt_tokens,
        plan.longest_tokens,
        teacher or None,
        draft,
        ranks or ranks_started(),
    )


def _teacher(recipe: Recipe) -> int | None:
    """Parameters of a separate reference model. 0 if there is none, None if not known."""
    if not recipe.reference.path:
        return 0
    return _shape_of(recipe, recipe.reference.path, "reference.path").parameters


def _shape_of(recipe: Recipe, path: str, setting: str) -> ModelShape:
    """Sizes of another model of the recipe.

    Args:
        recipe: the recipe.
        path: path or hub id of the model.
        setting: setting that names it.

    Raises:
        UserError: if there is no such model.
    """
    model = recipe.model.model_copy(update={"path": path, "revision": ""})
    return model_shape(recipe.model_copy(update={"model": model}), setting)


def memory_lines(plan: Plan) -> list[tuple[str, str]]:
    """Lines about each part, the sum, the GPUs on which it fits, and what helps.

    Returns:
        (statement, reason) pairs.
    """
    memory = memory_of(plan)
    if memory is None:
        return [_missing(plan)]
    lines = [
        (f"{p.name}{', in host memory' * p.host}: {gigabytes(p.size)}", p.formula)
        for p in memory.parts
        if p.size
    ]
    if (ranks := ranks_started()) > 1:
        says, why = f"on each of {ranks} GPUs, as torchrun starts ranks", "WORLD_SIZE"
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
    phase = "training" if memory.training >= memory.sampling else "sampling"
    why = (
        f"the larger of training and sampling; here {phase}. engine.release_kv ="
        f" {str(plan.recipe.engine.release_kv).lower()}"
    )
    lines.append((f"at the peak: {gigabytes(peak)}, and a tenth of the GPU as headroom", why))
    if memory.host:
        lines.append((f"in host memory: {gigabytes(memory.host)}", "not on the GPU"))
    lines.append((_cards(memory), "GB of 10^9 bytes; nothing else may run on the GPU"))
    backend = plan.recipe.rollout.backend.kind
    if backend != "engine":
        lines.append(
            (
                "the sampler's weights and cache are not counted",
                f"rollout.backend.kind = {backend} has a process of its own",
            )
        )
    devices = [] if plan.recipe.run.device == "cpu" else find_devices()
    device = _chosen(plan.recipe, devices)
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


def _missing(plan: Plan) -> tuple[str, str]:
    """(statement, remedy) about a memory plan that cannot be made."""
    if plan.model.unknown:
        return f"not known before the model is loaded: {plan.model.unknown}", ""
    named = [plan.recipe.model.path] if plan.model.parameters is None else []
    if _teacher(plan.recipe) is None:
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


def what_helps(plan: Plan, memory: MemoryPlan, ranks: int = 0) -> list[tuple[str, int]]:
    """(setting, saved bytes) pairs, with the largest saving first. Each setting is tried alone.

    Args:
        plan: the resolved recipe.
        memory: its memory.
        ranks: processes that torchrun starts. 0: those of this run.
    """
    found, started = [], ranks or ranks_started()
    size = plan.model.size
    experts = size.experts.count if size and size.experts else 0
    for setting, recipe in _changes(plan.recipe, experts, started):
        other = memory_of(replace(plan, recipe=recipe), started)
        saved = (
            0
            if other is None
            else memory.needed(memory.cache_least) - other.needed(other.cache_least)
        )
        if saved > 0:
            found.append((setting, saved))
    return sorted(found, key=lambda pair: -pair[1])


def _changes(recipe: Recipe, experts: int, ranks: int) -> Iterator[tuple[str, Recipe]]:
    """Settings that may save memory, each with the changed recipe.

    Args:
        recipe: the whole run.
        experts: experts per layer of the policy. 0: there are none.
        ranks: processes that torchrun starts.
    """
    trainer, running = recipe.trainer, recipe.engine.max_running
    wanted: list[tuple[str, str, object]] = [
        ("run", "precision", "bfloat16"),
        ("trainer", "activation_checkpointing", "full"),
        ("trainer", "max_tokens_per_microbatch", max(16, trainer.max_tokens_per_microbatch // 2)),
        ("trainer", "logprob_chunk", min(trainer.logprob_chunk, 256)),
        ("trainer", "activation_offload", True),
        ("engine", "release_kv", True),
        ("engine", "kv_tokens", 0),
        ("engine", "max_running", max(1, running // 2)),
        ("critic", "body", "policy"),
    ]
    alone, full = ranks == 1, not recipe.model.lora.rank
    if alone:  # several share the optimizer's state instead
        wanted += [("trainer", "optimizer", "adamw8bit"), ("trainer", "offload", "optimizer")]
    if doubled := _doubled_context(recipe.parallel, ranks):
        wanted.append(("parallel", "context", doubled))
    if doubled := _doubled_experts(recipe, experts, ranks):
        wanted.append(("parallel", "experts", doubled))
    if recipe.run.precision == "bfloat16" and full:
        wanted.append(("reference", "precision", "bfloat16"))
    if recipe.run.precision == "bfloat16" and full and alone:
        wanted.append(("trainer", "weights", "bfloat16"))
    if recipe.reference.placement == "inline" and full:
        wanted.append(("reference", "offload", True))
    if recipe.sync.kind == "copy":
        yield "sync.kind = 'shared'", recipe.model_copy(update={"sync": SharedSyncConfig()})
    yield from _bases(recipe)
    for section, key, value in wanted:
        part = getattr(recipe, section)
        if getattr(part, key) != value:
            changed = recipe.model_copy(update={section: part.model_copy(update={key: value})})
            shown = f"'{value}'" if isinstance(value, str) else str(value).lower()
            yield f"{section}.{key} = {shown}", changed


def _bases(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Smaller precisions of the frozen base of an adapter. None without an adapter."""
    lora = recipe.model.lora
    if not lora.rank:
        return
    bases = ("float32", "bfloat16", "nf4")
    for base in bases[bases.index(lora.base) + 1 :]:
        model = recipe.model.model_copy(update={"lora": lora.model_copy(update={"base": base})})
        changed, shown = recipe.model_copy(update={"model": model}), f"model.lora.base = '{base}'"
        if recipe.run.precision != "bfloat16":
            run = recipe.run.model_copy(update={"precision": "bfloat16"})
            changed = changed.model_copy(update={"run": run})
            shown += " with run.precision = 'bfloat16'"
        possible = False
        with suppress(UserError):
            check_lora(changed, resolve_algorithm(changed.algorithm))
            possible = True
        if possible:
            yield shown, changed


def _doubled_context(parallel: ParallelConfig, ranks: int) -> int | None:
    """Twice the size of a context group. None if the ranks of one copy are no such groups."""
    twice = 2 * parallel.context
    divides = ranks % (parallel.replicas * parallel.tensor * twice) == 0
    return twice if divides else None


def _doubled_experts(recipe: Recipe, experts: int, ranks: int) -> int | None:
    """Twice the size of an expert group. None if the run cannot have such groups.

    Args:
        recipe: the whole run.
        experts: experts per layer of the policy. 0: there are none.
        ranks: processes that torchrun starts.
    """
    parallel, twice = recipe.parallel, 2 * recipe.parallel.experts
    refused = recipe.model.lora.rank or recipe.trainer.optimizer == "adamw8bit"
    if not experts or refused or parallel.tensor > 1:
        return None
    divides = experts % twice == 0 and ranks % (parallel.replicas * twice) == 0
    return twice if divides else None


def _chosen(recipe: Recipe, devices: list[Device]) -> Device | None:
    """GPU that the run would use, or None.

    `cuda:N` counts the GPUs that CUDA_VISIBLE_DEVICES leaves; nvidia-smi lists all of them.
    """
    number = recipe.run.device.partition(":")[2]
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
