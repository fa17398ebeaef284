"""Mixtures of experts on a GPU: record, replay and balance loss equal those on the CPU."""

from __future__ import annotations

import copy

import torch
from fused_kernels import register_gpu
from phantom import is_phantom
from tests.models.experts import expert_model, sampled_groups
from tests.trainer.tiny import grpo, relative, settings
from torch import Tensor

from sixfold.batch import collate
from sixfold.recipe.schema import MoeConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.packing import pack
from sixfold.trainer.routing import make_routing
from sixfold.trainer.trainer import Trainer

DEVICE = register_gpu()


def test_the_engine_records_the_experts_of_the_cpu() -> None:
    model = expert_model("qwen3_moe")
    expected = sampled_groups(model)
    found = sampled_groups(copy.deepcopy(model).to(DEVICE))
    assert [[t.routes for t in g.trajectories] for g in found] == [
        [t.routes for t in g.trajectories] for g in expected
    ]


def test_replay_and_balance_loss_give_the_gradient_of_the_cpu() -> None:
    model, config = expert_model("qwen3_moe"), MoeConfig(balance_loss=0.3, routing="replay")
    batch = grpo().prepare(collate(sampled_groups(model)))

    def gradient(device: str) -> tuple[Tensor, float]:
        own = copy.deepcopy(model).to(device)  # type: ignore[arg-type]
        root = PolicyRoot(own, make_routing(own, config))
        trainer = Trainer(root, settings(max_tokens_per_microbatch=80), Scoring(), 10)
        metrics = trainer.train_step(batch.to(device), grpo().compute_loss)
        state = trainer.optimizer.state
        moments = torch.cat([state[p]["exp_avg"].flatten() for p in own.parameters()])
        return moments, metrics["moe/balance_loss"]  # type: ignore[return-value]

    expected, loss = gradient("cpu")
    found, ours = gradient(str(DEVICE))
    assert is_phantom(found) and relative(found.cpu(), expected) < 1e-5
    assert abs(ours - loss) < 1e-5


def test_the_record_of_a_packed_row_lies_on_the_device() -> None:
    model = expert_model("qwen3_moe")
    row = pack(collate(sampled_groups(model)).to(DEVICE), range(12), True)
    assert row.experts is not None and is_phantom(row.experts)
