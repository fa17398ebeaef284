"""Functions that the ranks of the tests run. Other processes import them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny import grpo, ragged_batch, settings, tiny_model

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.batch import Batch, LossOutput
from sixfold.ranks import Ranks
from sixfold.recipe.schema import MoeConfig, ParallelConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.routing import make_routing
from sixfold.trainer.sharded import own_part, shard_policy, whole
from sixfold.trainer.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """One step of training.

    Attributes:
        aggregation: how the loss is averaged.
        groups: groups of the batch.
        trained: parts of the names of trained parameters. Empty: all are trained.
        values: trainer settings.
        scoring: settings of the forward pass.
        model: kind and sizes of the model.
        batch: changes the batch.
        replicas: copies of the sharded model.
        tensor: ranks of a tensor group.
        balance: weight of the balance loss of experts.
    """

    aggregation: str = "sequence"
    groups: int = 3
    trained: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    scoring: Scoring = field(default_factory=Scoring)
    model: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[Batch], Batch] = lambda batch: batch
    replicas: int = 1
    tensor: int = 1
    balance: float = 0.0


def _pairs(batch: Batch) -> Batch:
    return batch.with_(unit=torch.arange(len(batch.tokens)) // 2)


def _two_updates(batch: Batch) -> Batch:
    return batch.with_(minibatch=(batch.group > 0).long())


SMALL = {"max_tokens_per_microbatch": 24}

CASES = {
    **{name: Case(name, values=SMALL) for name in AGGREGATIONS},
    "one micro-batch": Case(),
    "prompts not shared": Case(values={**SMALL, "share_prefix": False}),
    "chunks of logits": Case(scoring=Scoring(chunk=8)),
    "own head": Case(model={"tie_word_embeddings": False}, values=SMALL),
    "frozen base": Case(trained=("q_proj", "v_proj"), values=SMALL),
    "frozen base, last layer alone": Case(trained=("layers.1.self_attn.o_proj",)),
    "pairs": Case(batch=_pairs, values=SMALL),
    "several updates": Case(batch=_two_updates, values=SMALL),
    "one group": Case(groups=1),
    "many groups": Case(groups=7, values=SMALL),
    "recompute all": Case(values={**SMALL, "activation_checkpointing": "full"}),
    "recompute some": Case(values={**SMALL, "activation_checkpointing": "selective"}),
    "gpt2": Case(model={"kind": "gpt2"}),
    "gpt_oss": Case(model={"kind": "gpt_oss"}, values=SMALL),
    "balance loss": Case(
        model={"kind": "gpt_oss", "num_experts_per_tok": 1}, values=SMALL, balance=0.5
    ),
    "replicas": Case(values=SMALL, replicas=2),
}

DIVIDED = {
    "tied, clipped": Case(values={**SMALL, "grad_clip": 0.01}, tensor=2),
    "replicas, own head, biases": Case(
        model={"tie_word_embeddings": False, "attention_bias": True},
        values={**SMALL, "activation_checkpointing": "selective"},
        replicas=2,
        tensor=2,
    ),
    "one group of ranks, frozen base": Case(
        trained=("q_proj", "k_norm", "o_proj", "post_attention"),
        model={"num_key_value_heads": 4},
        values={**SMALL, "activation_checkpointing": "full", "grad_clip": 0.01},
        tensor=4,
    ),
}
"""Cases with tensor groups."""


def trainer_of(case: Case, ranks: Ranks, autocast: torch.dtype | None = None) -> Trainer:
    """Make a trainer on a new model, which is sharded if there are several ranks."""
    model = tiny_model(**case.model)
    if case.trained:
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in case.trained))
    root = PolicyRoot(model, make_routing(model, MoeConfig(balance_loss=case.balance)))
    if ranks.size > 1:
        parallel = ParallelConfig(replicas=case.replicas, tensor=case.tensor)
        ranks = shard_policy(root, ranks, parallel, autocast).ranks
    scoring = replace(case.scoring, autocast=autocast)
    return Trainer(root, settings(**case.values), scoring, total_steps=10, ranks=ranks)


def batch_of(case: Case) -> Batch:
    return case.batch(ragged_batch(0, grpo(case.aggregation), groups=case.groups))


def step(ranks: Ranks, case: Case, autocast: torch.dtype | None = None) -> dict[str, Any]:
    """Gradient, weights and metrics of one step. The gradient is AdamW's first moment, scaled."""
    trainer = trainer_of(case, ranks, autocast)
    metrics = trainer.train_step(batch_of(case), grpo(case.aggregation).compute_loss)
    state = trainer.optimizer.state
    moments = [state[p]["exp_avg"] for p in trainer.model.parameters() if p.requires_grad]
    gradient = torch.cat([whole(m).flatten() for m in moments]) / (1 - trainer.config.betas[0])
    return {
        "gradient": gradient,
        "weights": torch.cat([whole(p).detach().flatten() for p in trainer.model.parameters()]),
        "metrics": metrics,
        "skipped": trainer.skip_reason,
    }


def steps(ranks: Ranks, names: list[str]) -> dict[str, dict[str, Any]]:
    """Results of `step` for several cases."""
    return {name: step(ranks, (CASES | DIVIDED)[name]) for name in names}


def bfloat16_step(ranks: Ranks) -> dict[str, Any]:
    """Result of a step with bfloat16 forward passes."""
    return step(ranks, Case(values=SMALL), torch.bfloat16)


def _spoiled(batch: Batch, logp: torch.Tensor) -> LossOutput:
    """A loss that is NaN for the rows of group 1."""
    output = grpo().compute_loss(batch, logp)
    bad = bool((batch.group == 1).any())
    return replace(output, loss=output.loss * (float("nan") if bad else 1.0))


def spoiled_step(ranks: Ranks) -> dict[str, Any]:
    """Make a step with a NaN loss on one rank, and then an ordinary step."""
    case = Case(values=SMALL)
    trainer, batch = trainer_of(case, ranks), batch_of(case)
    forwards = list[int]()
    trainer.root.register_forward_hook(lambda *_: forwards.append(1))
    before = [own_part(p).clone() for p in trainer.model.parameters()]
    metrics = trainer.train_step(batch, _spoiled)
    after = [own_part(p) for p in trainer.model.parameters()]
    found = {
        "skipped": metrics["train/skipped"],
        "reason": trainer.skip_reason,
        "kept": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "passes": len(forwards),
    }
    sound = trainer.train_step(batch, grpo().compute_loss)
    return found | {"version": trainer.version, "sound": sound["train/grad_norm"]}
