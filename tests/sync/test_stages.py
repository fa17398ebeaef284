"""Stages of a weight sync: their times exclude inner stages, and their bytes are those moved."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.backends.weight_files import weights_folder
from sixfold.engine.engine import Engine
from sixfold.engine.weight_stages import record_stages, stage
from sixfold.model.causal_lm import CausalLM
from sixfold.model.trained_lora import add_lora
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import LoraConfig
from sixfold.report.schema import find
from sixfold.rollout.generator import wait_for
from sixfold.sync.adapter import AdapterSync
from sixfold.sync.base import WeightSync
from sixfold.sync.measured import MeasuredSync
from sixfold.sync.sync import CopySync, GatheredSync, SharedSync

Tiny = Callable[[str], PreTrainedModel]


def engine_of(model: PreTrainedModel) -> Engine:
    return Engine(CausalLM(model), kv_tokens=64, block_size=8)


def test_an_inner_stage_pauses_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 10.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with record_stages() as record, stage("verify"):
        with stage("gather", 8):
            pass
        with stage("gather", 4):
            pass
    assert record.metrics() == {
        "time/sync_verify_s": 1.0 + 0.5,
        "time/sync_gather_s": 2.0 + 6.5,
        "sync/gather_bytes": 12.0,
    }


def test_nothing_is_measured_outside_of_a_recording() -> None:
    with record_stages() as record:
        pass
    with stage("cast", 5):
        pass
    assert record.metrics() == {}


def test_a_failed_stage_ends_and_counts_no_bytes() -> None:
    with record_stages() as record:
        with pytest.raises(ValueError, match="in between"), stage("cast", 5):
            raise ValueError("in between")
        with stage("broadcast", 7):
            pass
    assert record.sizes == {"broadcast": 7} and record.seconds.keys() == {"cast", "broadcast"}


def test_stages_of_an_engine_in_another_process_are_recorded_inside_an_event_loop() -> None:
    async def load() -> None:
        with weights_folder({"a": torch.ones(6), "b": torch.ones(2)}, 1, torch.bfloat16):
            pass

    async def notebook() -> None:
        wait_for(load())

    for run in (lambda: wait_for(load()), lambda: wait_for(notebook())):
        with record_stages() as record:
            run()
        assert record.sizes == {"cast": 16, "broadcast": 16}


def made(kind: str, model: PreTrainedModel) -> WeightSync:
    """A sync of the model to a new engine."""
    if kind == "shared":
        return SharedSync(model, engine_of(model))
    if kind == "adapter":
        lora = add_lora(model, LoraConfig(rank=4, alpha=8.0), Base("base"), seed=3)
        return AdapterSync(lora, engine_of(lora.base))
    engine = engine_of(copy.deepcopy(model).requires_grad_(False))
    if kind == "gathered":
        return GatheredSync(lambda: dict(model.named_parameters()), engine, undo=True)
    if kind == "merged":
        lora = add_lora(model, LoraConfig(rank=4, alpha=8.0), Base("base"), seed=3)
        return CopySync(lora.model, engine, 1, lora=lora)
    if kind == "bfloat16":
        return CopySync(model, engine_of(copy.deepcopy(model).bfloat16()), 1)
    return CopySync(model, engine, 1, kind)


ALWAYS = {"verify", "invalidate"}
STAGES = {
    "shared": ALWAYS,
    "adapter": ALWAYS | {"gather", "broadcast"},
    "copy": ALWAYS | {"broadcast"},
    "int8": ALWAYS | {"broadcast", "cast"},
    "bfloat16": ALWAYS | {"broadcast", "cast"},
    "gathered": ALWAYS | {"broadcast", "gather"},
    "merged": ALWAYS | {"broadcast", "gather"},
}


@pytest.mark.parametrize("kind", STAGES)
def test_every_sync_reports_the_stages_that_it_has(tiny: Tiny, kind: str) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    size = sum(p.nbytes for p in model.parameters())
    sync = MeasuredSync(made(kind, model))
    sync.sync(1)
    stages = {key[10:-2] for key in sync.metrics if key.startswith("time/")}
    assert stages == STAGES[kind]
    assert all(value >= 0 and find(key) for key, value in sync.metrics.items())
    if kind == "adapter":
        matrices = (
            4 * 4 * sum(sum(m.weight.shape) for m in model.modules() if type(m) is torch.nn.Linear)
        )
        matrices -= 4 * 4 * sum(model.get_output_embeddings().weight.shape)
        assert sync.metrics["sync/gather_bytes"] == matrices
        assert sync.metrics["sync/broadcast_bytes"] == 4 * matrices, "rank 4 is padded to 16"
    elif kind != "shared":
        assert sync.metrics["sync/broadcast_bytes"] == size / (2 if kind == "bfloat16" else 1)
    sync.sync(1)
    assert sync.metrics == {}, "a step without an update"
