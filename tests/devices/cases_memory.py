"""State, activations or reference in host memory: same numbers, fewer bytes on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_kernels import register_gpu
from phantom import count_synchronisations, is_phantom
from tests.trainer.tiny import (
    Allocations,
    grpo,
    make_trainer,
    ragged_batch,
    relative,
    step_gradient,
    tiny_model,
)
from torch import Tensor

from sixfold.batch import filled
from sixfold.model.half_weights import store_in_bfloat16
from sixfold.reference.frozen import FrozenReference
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.packing import pack

DEVICE = register_gpu()
torch.set_num_threads(1)


class OnDevice(Allocations):
    """Counts allocations on the device, not on the host."""

    def _note(self, tensor: Tensor) -> None:
        if is_phantom(tensor):
            super()._note(tensor)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_offloaded_activations_change_no_gradient(mode: str, autocast: torch.dtype | None) -> None:
    model, batch = tiny_model().to(DEVICE), ragged_batch(1).to(DEVICE)
    kept, moved = (
        step_gradient(
            model,
            batch,
            grpo().compute_loss,
            Scoring(autocast=autocast, offload=offload),
            activation_checkpointing=mode,
        )
        for offload in (False, True)
    )
    assert torch.equal(kept, moved)


@pytest.mark.parametrize(("mode", "share"), [("none", 0.4), ("full", 0.6)])
def test_offloaded_activations_leave_the_device(mode: str, share: float) -> None:
    """Bytes that are still allocated after a forward pass of the body."""
    live = []
    for offload in (False, True):
        model = tiny_model(num_hidden_layers=8).to(DEVICE)
        trainer = make_trainer(model, activation_checkpointing=mode)
        row = pack(ragged_batch(1, groups=6).to(DEVICE), range(24), True)
        with OnDevice() as seen:
            states = PolicyRoot(trainer.model).states(row, Scoring(offload=offload))
            live.append(seen.live())
        assert is_phantom(states) and states.requires_grad
    assert live[1] < share * live[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw8bit"},
        {"weights": "bfloat16"},
        {"weights": "bfloat16", "rounding": "stochastic"},
    ],
)
def test_offloaded_state_is_on_the_host(settings: dict[str, Any]) -> None:
    """Weights equal those with the state on the device, up to the rounding of fused kernels."""
    weights = []
    for offload in ("none", "optimizer"):
        model = tiny_model(hidden_size=64)
        if "weights" in settings:
            model = store_in_bfloat16(model)
        scoring = Scoring(autocast=torch.bfloat16)
        trainer = make_trainer(model.to(DEVICE), scoring, offload=offload, **settings)
        for seed in range(2):
            trainer.train_step(ragged_batch(seed).to(DEVICE), grpo().compute_loss)
        state = [t for s in trainer.optimizer.state.values() for k, t in s.items() if k != "step"]
        assert {is_phantom(t) for t in state} == {offload == "none"}
        assert all(is_phantom(p) for p in model.parameters())
        weights.append(torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_fused_head_computes_the_cpus_gradient_without_waiting(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward pass, with an entropy gradient."""
    monkeypatch.setattr("sixfold.trainer.logprobs.SMALL", 0)
    model, batch = tiny_model(), ragged_batch(1)
    scoring = Scoring(0.8, 16, autocast, entropy_gradient=True)
    gradients = []
    for device in ("cpu", DEVICE):
        twin, row = copy.deepcopy(model).to(device), pack(batch.to(device), range(12), True)
        with count_synchronisations() as counts:
            scores = PolicyRoot(twin)(row, scoring)
            (scores.values.sum() + 0.3 * filled(scores.entropy, "entropy").sum()).backward()
        assert counts.at("trainer/fused_head") == 0, counts.table()
        gradients.append(torch.cat([p.grad.cpu().flatten() for p in twin.parameters()]))
    assert relative(gradients[1], gradients[0]) < (1e-5 if autocast is None else 0.05)


def test_offloaded_reference_is_on_the_device_only_while_it_scores() -> None:
    model, batch = tiny_model().to(DEVICE), ragged_batch(1).to(DEVICE)
    kept = FrozenReference(model, Scoring(), 60, True)
    moved = FrozenReference(model, Scoring(), 60, True, offload=True)
    assert not any(is_phantom(t) for t in moved.tensors().values())
    expected = kept.score(batch).ref_logp
    assert torch.equal(moved.score(batch).ref_logp, expected)
    assert not any(is_phantom(t) for t in moved.tensors().values())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    kept.reset(other)
    moved.reset(other)
    changed = moved.score(batch).ref_logp
    assert torch.equal(changed, kept.score(batch).ref_logp)
    assert not torch.equal(changed, expected)
