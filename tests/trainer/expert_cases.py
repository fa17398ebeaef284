"""What the ranks of the tests of expert groups run. Other processes import it by name."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rank_cases import SMALL, Case, batch_of, gradient, spoiled_step, step
from tests.models.experts import expert_model
from tiny import settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sixfold.batch import Batch, LossOutput
from sixfold.critic.value_model import make_value_root
from sixfold.model.half_weights import store_in_bfloat16
from sixfold.ranks import Ranks
from sixfold.recipe.schema import ParallelConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_tables
from sixfold.trainer.sharded import Shards, own_part, shard_policy, whole
from sixfold.trainer.trainer import Trainer
from sixfold.trainer.whole_weights import WholeWeights

REFUSED = {"jetmoe"}
"""Families whose experts cannot be divided. The cases have all forms of those that can be: with
biases, transposed, beside shared experts and layers without experts, chosen by a softmax or by a
sigmoid.
"""


EXCHANGED = {
    "qwen3_moe": Case(
        family="qwen3_moe", balance=0.3, values={**SMALL, "grad_clip": 0.01}, experts=2
    ),
    "frozen experts": Case(
        family="mixtral", trained=("q_proj", "mlp.gate."), values=SMALL, experts=2
    ),
    "two groups of ranks, recompute some, replay": Case(
        family="deepseek_v3",
        values={**SMALL, "activation_checkpointing": "selective"},
        balance=0.3,
        routing="replay",
        experts=2,
        everywhere=True,
    ),
    "replicas, recompute all": Case(
        family="mixtral",
        values={**SMALL, "activation_checkpointing": "full"},
        replicas=2,
        experts=2,
        everywhere=True,
    ),
    "one group of ranks and of rows, context groups": Case(
        family="gpt_oss", groups=1, balance=0.3, context=2, experts=4, everywhere=True
    ),
}
"""Cases with expert groups. Those of `everywhere` run on four ranks, the others on two."""

SPOILED = Case(family="qwen3_moe", values=SMALL, experts=2)


def expert_steps(ranks: Ranks) -> dict[str, Any]:
    """Results of one group of processes, by case."""
    few = ranks.size == 2
    found: dict[str, Any] = {n: step(ranks, c) for n, c in EXCHANGED.items() if c.everywhere != few}
    if few:
        found["bfloat16"] = bfloat16(ranks)
        found |= {"others": others(ranks), "spoiled": spoiled_step(ranks, SPOILED)}
    return found


def bfloat16(ranks: Ranks) -> dict[str, Any]:
    """Result of a step with bfloat16 forward passes."""
    return step(ranks, SPOILED, torch.bfloat16)


def others(ranks: Ranks) -> dict[str, Any]:
    """Results of other models that are sharded as the policy: a reference and a critic.

    Also whether the weights that a sync and a checkpoint gather are exactly those of the model, and
    how many experts of a layer this rank computes.
    """
    policy = expert_model("qwen3_moe")
    weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
    reference = PolicyRoot(store_in_bfloat16(copy.deepcopy(policy)).requires_grad_(False))
    critic = make_value_root(PolicyRoot(policy), "own", copy.deepcopy(policy))
    gathered, computed = True, set[int]()
    if ranks.size > 1:
        root = PolicyRoot(policy)
        shards = shard_policy(root, ranks, ParallelConfig(experts=ranks.size), None)
        shards.shard(critic)
        Shards(root, shards.mesh, ranks, torch.bfloat16).shard(reference)
        synced = WholeWeights(policy)
        gathered = all(torch.equal(synced[name], tensor) for name, tensor in weights.items())
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            gathered = gathered and torch.equal(whole(parameter.detach()), weights[name])
    for model in (reference.model, critic.model):
        _watch_experts(model, computed)
    batch = batch_of(Case())
    scoring = Scoring(autocast=torch.bfloat16)
    trainer = Trainer(critic, settings(**SMALL), Scoring(), total_steps=10, ranks=ranks)
    with torch.no_grad():
        trainer.root.model.score.weight.fill_(0.1)  # type: ignore[union-attr]
    trainer.train_step(batch, squares)
    return {
        "reference": score_tables(reference, batch, scoring, 24, True, ranks)[0],
        "critic": gradient(trainer),
        "gathered": gathered,
        "computed": computed,
    }


def _watch_experts(model: nn.Module, computed: set[int]) -> None:
    """Add the experts of a layer that a forward pass has, once they are gathered, to a set."""

    def look(module: Any, *_: object) -> None:
        computed.add(len(own_part(module.gate_up_proj)))

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(look)


def squares(batch: Batch, values: Tensor) -> LossOutput:
    """Squared error of values that should be 1."""
    assert batch.weights is not None
    return LossOutput((batch.weights.abs() * (values - 1.0) ** 2).sum())
