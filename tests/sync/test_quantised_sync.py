"""The engine gets what quantising makes of the trainer's weights: exactly, in place, whole or not
at all; the trainer's own stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import sixfold.engine.weights as engine_weights
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.sync.quantise import to_fp8, to_int8
from sixfold.sync.sync import CopySync, WeightsNotFinite
from sixfold.types import SamplingParams

pytestmark = pytest.mark.parametrize("form", ["int8", "fp8"])


@pytest.fixture
def trained(tiny: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(tiny("qwen3"))


@pytest.fixture
def engine(trained: PreTrainedModel) -> Engine:
    return Engine(
        CausalLM(copy.deepcopy(trained).requires_grad_(False)), kv_tokens=200, block_size=8
    )


def sampler(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.runner.model.module.named_parameters())


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in weights.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a
    )


def expected(model: PreTrainedModel, form: str) -> dict[str, Tensor]:
    """By the layers' names, not by how the sync finds them."""
    quantise = to_int8 if form == "int8" else to_fp8
    return {
        name: quantise(p.detach()).values() if "_proj" in name else p.detach()
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def learn(model: PreTrainedModel) -> None:
    for p in model.parameters():
        p.add_(0.01 * torch.randn_like(p))


def test_after_each_sync_the_engine_has_the_weights_in_its_own_buffers(
    trained: PreTrainedModel, engine: Engine, form: str
) -> None:
    sync, at = (
        CopySync(trained, engine, every=2, form=form),
        [p.data_ptr() for p in sampler(engine).values()],
    )
    assert not set(at) & {p.data_ptr() for p in trained.parameters()}
    sync.refresh()
    held = copied(expected(trained, form))
    for version in range(1, 6):
        learn(trained)
        before = copied(dict(trained.named_parameters()))
        sync.sync(version)
        if version % 2 == 0:
            held = copied(expected(trained, form))
        assert same_bits(sampler(engine), held)
        assert same_bits(dict(trained.named_parameters()), before), (
            "the trainer's own weights were altered"
        )
    assert [p.data_ptr() for p in sampler(engine).values()] == at
    engine.add("t", [2, 3], SamplingParams(max_tokens=2), [0])
    assert engine.run()[0].version == [4, 4]


@pytest.mark.slow
@torch.no_grad()
def test_updates_smaller_than_a_rounding_step_add_up(
    trained: PreTrainedModel, engine: Engine, form: str
) -> None:
    """Quantised anew from the trainer's numbers at each sync; rounding what is rounded already
    would lose every one of them.
    """
    sync, name = CopySync(trained, engine, every=1, form=form), "model.layers.0.mlp.up_proj.weight"
    sync.refresh()
    weight, first = trained.get_parameter(name), sampler(engine)[name].clone()
    step = float(weight.abs().max()) / 1000  # a quarter of what int8 rounds away
    for version in range(1, 101):
        weight.add_(step)
        sync.sync(version)
    assert float((sampler(engine)[name] - first).mean()) == pytest.approx(100 * step, rel=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_leave_the_engine_as_it_was(
    trained: PreTrainedModel, engine: Engine, form: str, bad: float, name: str
) -> None:
    sync = CopySync(trained, engine, every=1, form=form)
    sync.refresh()
    before = copied(sampler(engine))
    learn(trained)
    with torch.no_grad():
        trained.get_parameter(name).view(-1)[7] = bad
    with pytest.raises(
        WeightsNotFinite,
        match=rf"weight '{name}' is not finite .*: it was not passed",
    ):
        sync.sync(1)
    assert same_bits(sampler(engine), before) and engine.version == 0


def test_an_error_in_the_middle_puts_the_old_ones_back(
    trained: PreTrainedModel, engine: Engine, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = CopySync(trained, engine, every=1, form=form)
    sync.refresh()
    before, writes, write = copied(sampler(engine)), [], engine_weights._copy

    def fail_once(target: Tensor, source: Tensor) -> None:
        writes.append(target)
        if len(writes) == 5:
            raise OSError("the memory failed")
        write(target, source)

    monkeypatch.setattr(engine_weights, "_copy", fail_once)
    learn(trained)
    with pytest.raises(OSError, match="the memory failed"):
        sync.sync(1)
    assert len(writes) > 5 and same_bits(sampler(engine), before) and engine.version == 0


def test_the_copy_is_proven_for_the_rounded_weights(
    trained: PreTrainedModel, engine: Engine, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that brings the trainer's exact weights, as if nothing had been rounded, is not what
    was handed over.
    """
    sync, own = (
        CopySync(trained, engine, every=1, form=form),
        {p.shape: p for p in trained.parameters()},
    )
    monkeypatch.setattr(
        engine_weights, "_copy", lambda target, source: target.copy_(own[target.shape])
    )
    with pytest.raises(RuntimeError, match="differs from the given tensor"):
        sync.refresh()


def test_checkpoint_restores_the_synced_weights(
    trained: PreTrainedModel, engine: Engine, form: str
) -> None:
    """Of the last sync, which the trainer has left behind since."""
    sync = CopySync(trained, engine, every=2, form=form)
    for version in (1, 2, 3):
        learn(trained)
        sync.sync(version)
    saved = copied(sync.tensors())
    resumed = Engine(
        CausalLM(copy.deepcopy(trained).requires_grad_(False)), kv_tokens=200, block_size=8
    )
    again = CopySync(trained, resumed, every=2, form=form)
    again.refresh()
    assert not same_bits(sampler(resumed), sampler(engine))
    again.load(saved, sync.state())
    assert same_bits(sampler(resumed), sampler(engine)) and resumed.version == 2
    learn(trained)
    again.sync(4)
    assert same_bits(sampler(resumed), expected(trained, form)) and resumed.version == 4
