"""Activation checkpointing: the same gradients from fewer kept bytes, and nothing else about the
model changes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import Allocations, grpo, make_trainer, ragged_batch, step_gradient, tiny_model
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.trainer.checkpointing import apply_activation_checkpointing
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.packing import pack
from sixfold.types import SamplingParams

torch.set_num_threads(1)
MODES = ["none", "selective", "full"]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_bitwise_those_without(kind: str, mode: str) -> None:
    model, algorithm = tiny_model(kind), grpo(beta=0.05)
    batch = ragged_batch(1, algorithm)
    expected = step_gradient(model, batch, algorithm.compute_loss)
    got = step_gradient(model, batch, algorithm.compute_loss, activation_checkpointing=mode)
    assert torch.equal(got, expected)


def _kept_bytes(mode: str) -> int:
    """Storage still alive between forward and backward, on a model deep enough for its layers to
    outweigh the rest.
    """
    model = tiny_model(num_hidden_layers=6, intermediate_size=96)
    apply_activation_checkpointing(model, mode)  # type: ignore[arg-type]
    row = pack(ragged_batch(1, longest=30), range(12), True)
    with Allocations() as seen:
        logp, _ = PolicyRoot(model)(row, Scoring())
        kept = seen.live()
    logp.sum().backward()
    return kept


@pytest.mark.slow
def test_memory_kept_falls_from_none_to_selective_to_full_checkpointing() -> None:
    none, selective, full = (_kept_bytes(mode) for mode in MODES)
    assert full < 0.35 * none
    assert full < selective < 0.75 * none


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_layers_run_twice_with_gradients_and_once_without(mode: str) -> None:
    model = tiny_model()
    apply_activation_checkpointing(model, mode)  # type: ignore[arg-type]
    runs: list[int] = []
    norm = next(m for m in model.modules() if type(m).__name__ == "Qwen3RMSNorm")
    norm.register_forward_hook(lambda *_: runs.append(1))
    batch = ragged_batch(1)
    score_batch(model, batch, Scoring(), 10**6, True)
    assert len(runs) == 1
    logp, _ = PolicyRoot(model)(pack(batch, range(12), True), Scoring())
    logp.sum().backward()
    assert len(runs) == 3


def test_dropout_stays_off_and_the_flag_is_on_the_layers_alone() -> None:
    model = tiny_model()
    apply_activation_checkpointing(model, "full")
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert len(layers) == 2 and all(layer.training for layer in layers)
    assert not any(
        m.training for m in model.modules() if not isinstance(m, GradientCheckpointingLayer)
    )
    apply_activation_checkpointing(model, "none")
    assert not any(m.training for m in model.modules())
    assert not any(layer.gradient_checkpointing for layer in layers)


def test_a_copy_runs_its_own_layers() -> None:
    """A frozen reference or an engine copied from a checkpointed policy must not follow the
    policy's weights.
    """
    model = tiny_model()
    apply_activation_checkpointing(model, "full")
    twin = copy.deepcopy(model)
    batch = ragged_batch(1)
    before = score_batch(twin, batch, Scoring(), 10**6, True)
    row = pack(batch, range(12), True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    logp, _ = PolicyRoot(twin)(row, Scoring())  # with gradients, so through the checkpoint
    torch.testing.assert_close(logp.detach(), before[row.row, row.column], atol=1e-6, rtol=1e-6)


def test_the_engine_decodes_the_same_tokens() -> None:
    """The sampler shares the module."""
    completions = []
    for mode in MODES:
        model = tiny_model()
        make_trainer(model, activation_checkpointing=mode)
        engine = Engine(CausalLM(model), kv_tokens=512)
        engine.add("t", [3, 4, 5], SamplingParams(12, seed=1), [0, 1])
        completions.append({s.sample: (s.tokens, s.logp) for s in engine.run()})
    assert completions[0] == completions[1] == completions[2]


def test_an_architecture_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"activation_checkpointing = 'full'.*Linear"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")  # type: ignore[arg-type]
    apply_activation_checkpointing(nn.Linear(2, 2), "none")  # type: ignore[arg-type]
