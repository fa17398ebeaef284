"""Functions that the ranks of the tests run. Other processes import them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from tests.models.experts import expert_model, sampled_groups
from tiny import grpo, ragged_batch, relative, settings, tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.batch import Batch, LossOutput, collate
from sixfold.errors import UserError
from sixfold.model.half_weights import store_in_bfloat16
from sixfold.model.trained_lora import add_lora
from sixfold.ranks import Ranks
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import LoraConfig, MoeConfig, ParallelConfig, TrainerConfig
from sixfold.trainer import logprobs
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_tables
from sixfold.trainer.optimizer import make_optimizer, reset_optimizer
from sixfold.trainer.optimizer_state import load_optimizer_tensors, optimizer_tensors
from sixfold.trainer.routing import make_routing
from sixfold.trainer.sharded import (
    own_part,
    place,
    rank_mesh,
    shard_policy,
    shard_root,
    whole,
    whole_at,
)
from sixfold.trainer.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """One step of training.

    Attributes:
        aggregation: how the loss is averaged.
        everywhere: run it on four ranks too, not on two alone.
        groups: groups of the batch.
        trained: parts of the names of trained parameters. Empty: all are trained.
        values: trainer settings.
        scoring: settings of the forward pass.
        model: kind and sizes of the model.
        batch: changes the batch.
        replicas: copies of the sharded model.
        tensor: ranks of a tensor group.
        experts: ranks of an expert group.
        family: a mixture of experts of this family instead of `model`.
        routing: "replay": a batch of this family is sampled by an engine that records experts.
        context: ranks of a context group.
        small: largest table of logits that is left to autograd. None: the usual one.
        balance: weight of the balance loss of experts.
        lora: settings of an adapter, which is trained instead of the weights.
    """

    aggregation: str = "sequence"
    everywhere: bool = False
    groups: int = 3
    trained: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    scoring: Scoring = field(default_factory=Scoring)
    model: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[Batch], Batch] = lambda batch: batch
    replicas: int = 1
    tensor: int = 1
    experts: int = 1
    family: str = ""
    routing: Literal["free", "measure", "replay"] = "free"
    context: int = 1
    small: int | None = None
    balance: float = 0.0
    lora: LoraConfig | None = None


def _pairs(batch: Batch) -> Batch:
    return batch.with_(unit=torch.arange(len(batch.tokens)) // 2)


def _two_updates(batch: Batch) -> Batch:
    return batch.with_(minibatch=(batch.group > 0).long())


SMALL_TABLE = logprobs.SMALL
SMALL = {"max_tokens_per_microbatch": 24}
FEW = {"max_tokens_per_microbatch": 60}
"""Micro-batches are few: a tensor group spends a second on each new length of a row."""
ADAPTER = LoraConfig(rank=4, alpha=8.0)

CASES = {
    "one micro-batch": Case(),
    "prompts not shared": Case(values={**SMALL, "share_prefix": False}),
    "chunks of logits": Case(scoring=Scoring(chunk=8)),
    "own head": Case(model={"tie_word_embeddings": False}, values=SMALL),
    "frozen base": Case(trained=("q_proj", "v_proj"), values=SMALL),
    "frozen base, last layer alone": Case(trained=("layers.1.self_attn.o_proj",), everywhere=True),
    "pairs": Case(batch=_pairs, values=SMALL),
    "several updates": Case(batch=_two_updates, values=SMALL),
    "one group": Case(groups=1, everywhere=True),
    "many groups": Case(groups=7, values=SMALL),
    "recompute all": Case(values={**SMALL, "activation_checkpointing": "full"}),
    "recompute some": Case(values={**SMALL, "activation_checkpointing": "selective"}),
    "gpt2": Case(model={"kind": "gpt2"}),
    "gpt_oss": Case(model={"kind": "gpt_oss"}, values=SMALL),
    "balance loss": Case(
        model={"kind": "gpt_oss", "num_experts_per_tok": 1}, values=SMALL, balance=0.5
    ),
    "replicas": Case(values=SMALL, replicas=2, everywhere=True),
    "lora, one group": Case(groups=1, lora=ADAPTER, everywhere=True),
    "lora, two modules, own head": Case(
        model={"tie_word_embeddings": False},
        values=SMALL,
        lora=LoraConfig(rank=3, targets=("q_proj", "down_proj"), rslora=True),
    ),
    "lora, recompute some": Case(
        values={**SMALL, "activation_checkpointing": "selective"}, lora=ADAPTER
    ),
    "lora, replicas": Case(lora=ADAPTER, replicas=2, everywhere=True),
}

DIVIDED = {
    "tied, clipped": Case(values={**SMALL, "grad_clip": 0.01}, tensor=2),
    "replicas, own head, biases": Case(
        model={"tie_word_embeddings": False, "attention_bias": True},
        values={**FEW, "activation_checkpointing": "selective"},
        replicas=2,
        tensor=2,
    ),
    "one group of ranks, frozen base": Case(
        trained=("q_proj", "k_norm", "o_proj", "post_attention"),
        model={"num_key_value_heads": 4},
        values={**FEW, "activation_checkpointing": "full", "grad_clip": 0.01},
        tensor=4,
    ),
    "one group of ranks, large tied head": Case(
        model={"num_key_value_heads": 4, "vocab_size": 2100}, small=0, tensor=4
    ),
    "one group of rows": Case(groups=1, tensor=2),
}
"""Cases with tensor groups."""

AVERAGED = {
    "weights": Case(values={**SMALL, "learning_rate": 1e-9}),
    "lora": Case(values={**SMALL, "learning_rate": 1e-9}, lora=ADAPTER),
}
"""What is trained under every aggregation. The weights hardly move."""


def trainer_of(case: Case, ranks: Ranks, autocast: torch.dtype | None = None) -> Trainer:
    """Make a trainer on a new model, which is sharded if there are several ranks."""
    model = expert_model(case.family) if case.family else tiny_model(**case.model)
    if case.trained:
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in case.trained))
    base: Sequence[nn.Parameter] = ()
    if case.lora:
        model, base = _adapted(model, case.lora)
    moe = MoeConfig(balance_loss=case.balance, routing=case.routing)
    root = PolicyRoot(model, make_routing(model, moe))
    if ranks.size > 1:
        parallel = ParallelConfig(
            replicas=case.replicas, tensor=case.tensor, experts=case.experts, context=case.context
        )
        ranks = shard_policy(root, ranks, parallel, autocast, base).ranks
    scoring = replace(case.scoring, autocast=autocast)
    return Trainer(root, settings(**case.values), scoring, total_steps=10, ranks=ranks)


def _adapted(
    model: PreTrainedModel, config: LoraConfig
) -> tuple[PreTrainedModel, list[nn.Parameter]]:
    """The model with an adapter that changes its outputs, and the parameters of its base."""
    lora = add_lora(model, config, Base(""), seed=3)
    torch.manual_seed(1)
    for p in lora.weights().values():
        nn.init.normal_(p, std=0.1)
    return lora.model, list(lora.base.parameters())


def batch_of(case: Case) -> Batch:
    if case.family and case.routing != "free":
        return grpo(case.aggregation).prepare(collate(sampled_groups(expert_model(case.family))))
    return case.batch(ragged_batch(0, grpo(case.aggregation), groups=case.groups))


def step(ranks: Ranks, case: Case, autocast: torch.dtype | None = None) -> dict[str, Any]:
    """Gradient, weights and metrics of one step. The gradient is AdamW's first moment, scaled."""
    logprobs.SMALL = SMALL_TABLE if case.small is None else case.small
    trainer = trainer_of(case, ranks, autocast)
    metrics = trainer.train_step(batch_of(case), grpo(case.aggregation).compute_loss)
    return {
        "gradient": gradient(trainer),
        "weights": torch.cat([whole(p).detach().flatten() for p in trainer.model.parameters()]),
        "metrics": metrics,
        "skipped": trainer.skip_reason,
    }


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that the step of one rank is that of one process: gradient, weights and metrics."""
    assert found["skipped"] == ""
    assert relative(found["gradient"], expected["gradient"]) < 1e-5
    assert relative(found["weights"], expected["weights"]) < 1e-4
    metrics = dict(found["metrics"])
    assert metrics.keys() == expected["metrics"].keys()
    assert metrics.pop("train/microbatches") >= 1.0 and metrics.pop("train/tokens") > 0.0
    for key, value in metrics.items():
        assert value == pytest.approx(expected["metrics"][key], rel=1e-4, abs=1e-6), key


def steps(ranks: Ranks, names: list[str]) -> dict[str, dict[str, Any]]:
    """Results of `step` for several cases."""
    return {name: step(ranks, (CASES | DIVIDED)[name]) for name in names}


def gradient(trainer: Trainer) -> torch.Tensor:
    """Gradient of the first update."""
    state = trainer.optimizer.state
    moments = [state[p]["exp_avg"] for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([whole(m).flatten() for m in moments]) / (1 - trainer.config.betas[0])


def averaged(ranks: Ranks, case: Case) -> dict[str, torch.Tensor]:
    """Gradient of the same trainer under every aggregation."""
    found = {}
    trainer = trainer_of(case, ranks)
    for name in AGGREGATIONS:
        batch = batch_of(replace(case, aggregation=name))
        trainer.train_step(batch, grpo(name).compute_loss)
        found[name] = gradient(trainer)
        reset_optimizer(trainer.optimizer)
    return found


def everything(ranks: Ranks) -> dict[str, Any]:
    """All that the ranks of the tests compute, in one group of processes."""
    few = ranks.size > 2
    cases = [n for n, case in CASES.items() if case.everywhere or not few]
    return {
        **{n: step(ranks, CASES[n]) for n in cases if ranks.size % CASES[n].replicas == 0},
        **{f"averaged {trained}": averaged(ranks, case) for trained, case in AVERAGED.items()},
        "spoiled": spoiled_step(ranks),
        "8 bits": eight_bit(ranks),
        **({} if few else {"bfloat16": bfloat16_step(ranks), "scores": bfloat16_scores(ranks)}),
    }


def matrices(ranks: Ranks, **shapes: tuple[int, ...]) -> nn.Module:
    """A module with random parameters, sharded if there are several ranks."""
    torch.manual_seed(0)
    made = nn.Module()
    for name, shape in shapes.items():
        made.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return fully_shard(made, mesh=rank_mesh(ranks, 1, "cpu").every) if ranks.size > 1 else made


def eight_bit(ranks: Ranks) -> dict[str, Any]:
    """Weights and state after four updates with 8-bit moments, the last one after a resume.

    The entries of one parameter are whole blocks, so ranks can have different numbers of them, and
    a fourth rank has none. Blocks of the others contain several entries.
    """
    model = matrices(ranks, long=(5, 1024), short=(128, 64), vector=(8192,), small=(16,))
    config = TrainerConfig(optimizer="adamw8bit", learning_rate=1e-3)
    optimizer = make_optimizer(model, config)
    _update(model, optimizer, range(3))
    saved = {n: whole(t).clone() for n, t in optimizer_tensors(optimizer, model).items()}
    resumed = make_optimizer(model, config)
    load_optimizer_tensors(resumed, model, saved)
    _update(model, resumed, range(3, 4))
    state = {n: whole(t).clone() for n, t in optimizer_tensors(resumed, model).items()}
    refused = ""
    try:
        make_optimizer(matrices(ranks, crossing=(68, 64)), config)
    except UserError as error:
        refused = str(error)
    weights = {n: whole(p.detach()) for n, p in model.named_parameters()}
    return {"saved": saved, "state": state, "weights": weights, "refused": refused}


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step_number in steps:
        torch.manual_seed(step_number)
        for p in model.parameters():
            p.grad = place(p, torch.randn(p.shape))
        optimizer.step()


def bfloat16_step(ranks: Ranks) -> dict[str, Any]:
    """Result of a step with bfloat16 forward passes."""
    return step(ranks, Case(values=SMALL), torch.bfloat16)


def bfloat16_scores(ranks: Ranks) -> torch.Tensor:
    """Log-probs of a reference with bfloat16 matrices."""
    root = PolicyRoot(store_in_bfloat16(tiny_model()).requires_grad_(False))
    table = root.model.get_input_embeddings().weight
    if ranks.size > 1:
        shard_root(root, rank_mesh(ranks, 1, "cpu"), torch.bfloat16)
        saved = whole_at(root.model.get_input_embeddings().weight.detach(), 0)
        assert saved is None if ranks.rank else torch.equal(saved, table)
    assert {p.dtype for p in root.parameters() if p.dim() > 1} == {torch.bfloat16}
    scoring = Scoring(autocast=torch.bfloat16)
    return score_tables(root, batch_of(Case()), scoring, 24, True, ranks)[0]


def _spoiled(batch: Batch, logp: torch.Tensor) -> LossOutput:
    """A loss that is NaN for the rows of group 1."""
    output = grpo().compute_loss(batch, logp)
    bad = bool((batch.group == 1).any())
    return replace(output, loss=output.loss * (float("nan") if bad else 1.0))


def spoiled_step(ranks: Ranks, case: Case = Case(values=SMALL)) -> dict[str, Any]:
    """Make a step with a NaN loss on one rank, and then an ordinary step."""
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
