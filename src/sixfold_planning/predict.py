"""The predictor of the core: what planning expects of a run, in the run's `prediction.json`."""

from __future__ import annotations

import re
from pathlib import Path

from sixfold.errors import UserError
from sixfold.files.durable import write_json_atomic, write_text_atomic
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import Plan
from sixfold.recipe.schema import Recipe
from sixfold.report.prediction import FILE

from .hardware import Accelerator, Cluster, find_accelerator
from .hardware_file import measured_hardware, measured_path
from .planned_work import placed, planned_inputs
from .prediction import HARDWARE, Prediction, read

LEAST_MEMORY, MOST_MEMORY = 0.9, 1.15
"""Memory of a GPU divided by that of the listed accelerator of its name. A GPU outside this range
is another device, such as an A100 with 40 GB or an H100 NVL with 94 GB.
"""


def write(folder: Path, recipe: Recipe, *, device: str, ranks: int, step: int) -> Prediction | None:
    """As `Predictor.write`.

    A resume on the same device with the same settings writes the same files.
    """
    earlier = _earlier(folder)
    try:
        found = _predicted(recipe, device, ranks, step + 1)
        record = found.record()
        if earlier is not None and record == {**earlier.record(), "first_step": step + 1}:
            found, record = earlier, earlier.record()
    except (UserError, ArithmeticError) as error:
        found, record = None, {"missing": str(error)}
    if found is not None and found.measured:
        write_text_atomic(folder / HARDWARE, measured_path().read_text(encoding="utf-8"))
    write_json_atomic(folder / FILE, record)
    return found


def _earlier(folder: Path) -> Prediction | None:
    """The prediction of an earlier process of the run."""
    try:
        found = read(folder)
    except UserError:
        return None
    return found if isinstance(found, Prediction) else None


def _predicted(recipe: Recipe, device: str, ranks: int, first_step: int) -> Prediction:
    """Raises UserError with the reason if nothing can be predicted."""
    import torch  # not needed to read a prediction

    cluster, measured = known_devices(device, ranks)
    if not Path(recipe.data.curriculum.profile).expanduser().is_file():  # a resume goes on without
        recipe = recipe.with_settings({"data.curriculum.profile": ""})
    inputs = planned_inputs(recipe.run.name, recipe, mean_tokens=None)
    memory = None if device == "cpu" else _peak_bytes(inputs.plan, device, ranks)
    sharing, threads = ranks // cluster.count, torch.get_num_threads()
    where = placed(recipe.placement, recipe.rollout, threads, cluster.device, sharing)
    return Prediction(inputs.arch, cluster, measured, inputs.work, where, first_step, memory)


def known_devices(device: str, ranks: int) -> tuple[Cluster, bool]:
    """Devices of a run, and whether they were measured on this machine.

    Ranks on the CPU share one device.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        UserError: if the device was not measured and is not in the table. The message says how to
            measure it.
    """
    import torch  # not needed to read a prediction

    count = 1 if device == "cpu" else ranks
    try:
        name = "" if device == "cpu" else torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the device {device} has no name: {error}") from error
    measured = measured_hardware()
    if measured is not None and _fits(measured.device.name, name):
        return Cluster(measured.device, count), True
    if not name:
        raise UserError(
            "the speed of this CPU is not known. Measure it before the next run: sixfold plan"
            " --measure"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    listed = _listed(name)
    memory = total / listed.memory_gb / 1e9 if listed else 0.0
    if listed is None or not LEAST_MEMORY <= memory <= MOST_MEMORY:
        raise UserError(
            f"the speed of {name} with {total / 1e9:.0f} GB is not known. Measure it before the"
            " next run: sixfold plan --measure"
        )
    return Cluster(listed, count), False


def _fits(measured: str, gpu: str) -> bool:
    """Whether a measured device is the one of the run.

    Args:
        measured: name in the hardware file, such as "this machine (NVIDIA L4)" or "this machine
            (x86_64 CPU, 2 threads)".
        gpu: name of the run's GPU, or "" for the CPU.
    """
    if gpu:
        return measured == gpu or f"({gpu})" in measured
    return bool(re.search(r"\bCPU\b", measured))


def _listed(name: str) -> Accelerator | None:
    try:
        return find_accelerator(name)
    except UserError:
        return None


def _peak_bytes(plan: Plan, device: str, ranks: int) -> int | None:
    """Predicted peak memory of one GPU. None: sizes of a model are not known."""
    import torch

    memory = memory_of(plan, ranks)
    if memory is None:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    cache = memory.cache_that_fits(total)
    return memory.needed(memory.cache_least if cache is None else cache)
