"""Sync of gathered weights into an engine of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.sync.sync import GatheredSync, SyncError, WeightsNotFinite


def test_engine_gets_weights_that_are_finite_and_fit(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    engine = Engine(CausalLM(copy.deepcopy(model)), kv_tokens=200, block_size=8)
    given: dict[str, torch.Tensor] = dict(model.named_parameters())
    sync = GatheredSync(lambda: given, engine, undo=True)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    sync.sync(1)
    norm = engine.runner.model.module.get_parameter("model.norm.weight")
    assert engine.version == 1 and torch.equal(norm, model.model.norm.weight)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(WeightsNotFinite, match=r"'model.norm.weight'.*trainer.learning_rate"):
        sync.sync(2)
    given["model.norm.weight"] = torch.ones(3)
    with pytest.raises(SyncError, match=r"model.norm.weight") as error:
        sync.sync(2)
    assert not isinstance(error.value, WeightsNotFinite)
    assert engine.version == 1 and bool(norm.isfinite().all())
