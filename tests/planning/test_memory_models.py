"""The three memory models of a trainer agree where more than one applies: Llama 3 8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sixfold.recipe.memory import memory_of
from sixfold.sizing.work import TrainingPass, layer_bytes
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.hardware import parse_cluster
from sixfold_planning.memory import layer_activation_bytes
from sixfold_planning.page.inputs import read_inputs
from sixfold_planning.planned_work import Inputs
from sixfold_planning.planner import compare_topologies
from sixfold_planning.pools import PoolFit, pool_fit
from sixfold_planning.published import layer_bytes as published_layer_bytes
from sixfold_planning.published import training_gib
from sixfold_planning.train_time import Layout

TOKENS, CHUNK = 8192, 1024
ENGINE = ("engine's weights", "sync copy")
STATE = ("weights", "gradients", "AdamW moments")


def inputs(recompute: str) -> Inputs:
    flags = [f"--trainer.activation_checkpointing={recompute}", f"--trainer.logprob_chunk={CHUNK}"]
    return read_inputs("Llama-3-8B", flags, mean_tokens=None)


def own(recompute: str, devices: int) -> tuple[int, int]:
    """Sixfold's trainer: bytes per device, and those of weights, gradients and moments."""
    plan = memory_of(inputs(recompute).plan, devices)
    assert plan is not None
    parts = {p.name: p.size for p in plan.parts if p.trains and not p.host}
    total = sum(size for name, size in parts.items() if name not in ENGINE)
    return total, sum(parts[name] for name in STATE)


def published(recompute: str, devices: int) -> float:
    """Bytes per device of an FSDP trainer, as predicted for published measurements."""
    found = training_gib(
        inputs(recompute).arch,
        Layout(devices, 1, 1, 1),
        TOKENS,
        1,
        recompute,
        adapters=False,
        offloaded=False,
        chunked_head=True,
    )
    return found * 2**30


def pools(recompute: str, devices: int) -> PoolFit:
    """The estimate for a trainer with devices of its own."""
    given, cluster = inputs(recompute), parse_cluster("16xH100")
    found = compare_topologies(given.arch, cluster, given.work, CONSTANTS)
    apart = replace(found.topologies["disaggregated"], training_devices=devices)
    return pool_fit(given.arch, cluster.device, apart, given.work, chunk=CHUNK)


@pytest.mark.parametrize("devices", [8, 64])
def test_the_training_state(devices: int) -> None:
    """16 bytes per parameter in float32, and 18 with bfloat16 weights and a float32 copy."""
    parameters = inputs("full").plan.model.parameters
    assert parameters is not None
    _, state = own("full", devices)
    assert state == pytest.approx(16 * parameters / devices, abs=64)
    assert pools("full", devices).state == pytest.approx(18 / 16 * state, rel=1e-6)


def test_the_activations_of_a_layer() -> None:
    """Sixfold keeps a float32 residual stream, and casts a norm's result for each product."""
    given = inputs("none")
    size, arch = given.plan.model.size, given.arch
    assert size is not None
    stream = 4 * (2 * size.hidden + size.heads + 2) + 2 * 2 * size.hidden
    kept = layer_bytes(size, TrainingPass(tokens=1, width=2))
    theirs = published_layer_bytes(arch)
    assert kept == pytest.approx(theirs + stream, rel=1e-4)
    assert kept < 1.35 * theirs
    # Korthikanti et al. have dropout, no gate, and as many key-value heads as query heads.
    gelu = layer_activation_bytes(
        length=TOKENS, sequences=1, hidden=arch.hidden, heads=arch.heads, tensor=1,
        sequence_parallel=False, recompute="selective",
    )  # fmt: skip
    assert TOKENS * theirs == pytest.approx(gelu, rel=0.15)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_whole_trainer_on_eight_devices(recompute: str) -> None:
    """Sixfold's trainer needs more: gathered float32 tables, and whole gradients of two layers."""
    total, _ = own(recompute, 8)
    assert published(recompute, 8) < total < 1.5 * published(recompute, 8)
    assert pools(recompute, 8).trainer == pytest.approx(published(recompute, 8), rel=0.15)
