"""What the ranks of context groups compute in the tests. Other processes import it by name."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from rank_cases import ADAPTER, FEW, SMALL, Case, averaged, batch_of, spoiled_step, step, trainer_of
from tiny import VOCABULARY, tiny_model
from torch import Tensor

from sixfold.batch import Batch, KeptSets, LossOutput, filled, number
from sixfold.critic.critic import Critic
from sixfold.ranks import Ranks
from sixfold.recipe.schema import CriticConfig, ParallelConfig, TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_tables
from sixfold.trainer.packing import pack
from sixfold.trainer.sharded import shard_policy
from sixfold.types import Routes


def with_kept_sets(batch: Batch) -> Batch:
    """Half of the sampled tokens were drawn from three tokens, the others from all."""
    start, count = torch.zeros_like(batch.tokens), torch.zeros_like(batch.tokens)
    ids = list[int]()
    for i, (b, column) in enumerate(batch.mask.nonzero().tolist()):
        if i % 2:
            start[b, column], count[b, column] = len(ids), 3
            ids += [(int(batch.tokens[b, column]) + n) % VOCABULARY for n in (0, 1, 5)]
    return batch.with_(kept=KeptSets(torch.tensor(ids, dtype=torch.int32), start, count))


def with_routes(batch: Batch) -> Batch:
    """Rows of two groups know the expert of every token in both layers. Prompts are alike."""

    def record(group: int, row: int) -> Routes | None:
        alike, own = random.Random(group), random.Random(f"row {row}")
        prompt = 2 * int(batch.prompt_lengths[row])
        count = 2 * (int(batch.lengths[row]) - 1)
        chosen = bytes((alike if i < prompt else own).randrange(2) for i in range(count))
        return Routes(2, 1, 1, chosen) if group < 2 else None

    return batch.with_(routes=[record(g, b) for b, g in enumerate(batch.group.tolist())])


def one_short_row(batch: Batch) -> Batch:
    """Only the first row counts. It has two tokens."""
    assert batch.weights is not None and int(batch.lengths[0]) == 2
    return batch.with_(weights=batch.weights * (torch.arange(len(batch.tokens)) == 0)[:, None])


STILL = {"learning_rate": 1e-9}
"""For gradients that should be 0: AdamW turns their rounding errors into steps."""
LARGE = {"tie_word_embeddings": False, "vocab_size": 2100}
EXPERTS = {"kind": "gpt_oss", "num_experts_per_tok": 1}

PAIRS = {
    "one micro-batch": Case(context=2),
    "chunks, prompts not shared": Case(
        values={**SMALL, "share_prefix": False}, scoring=Scoring(chunk=8), context=2
    ),
    "kept sets, clipped": Case(
        values={**SMALL, "grad_clip": 0.01}, batch=with_kept_sets, context=2
    ),
    "fused head, recompute all": Case(
        model=LARGE, small=0, values={"activation_checkpointing": "full"}, context=2
    ),
    "window, recompute some": Case(
        model={"kind": "mistral"}, values={"activation_checkpointing": "selective"}, context=2
    ),
    "soft caps": Case(model={"kind": "gemma2"}, values=SMALL, context=2),
    "positions by table": Case(model={"kind": "gpt2"}, context=2),
    "experts, sinks": Case(model=EXPERTS, balance=0.5, context=2),
    "replayed experts": Case(
        model=EXPERTS,
        balance=0.5,
        routing="replay",
        values={**SMALL, "activation_checkpointing": "full"},
        batch=with_routes,
        context=2,
    ),
    "adapter": Case(
        lora=ADAPTER, values={**SMALL, "activation_checkpointing": "selective"}, context=2
    ),
}
"""Cases of one context group of two ranks."""

FOURS = {
    "two groups": Case(values=SMALL, context=2),
    "two groups, one without rows": Case(groups=1, context=2),
    "two copies": Case(values=SMALL, replicas=2, context=2),
    "ranks without positions": Case(values=STILL, batch=one_short_row, context=4),
    "experts of no positions": Case(
        model=EXPERTS,
        balance=0.5,
        routing="replay",
        values=STILL,
        batch=lambda batch: one_short_row(with_routes(batch)),
        context=4,
    ),
    "tensor groups": Case(values=FEW, tensor=2, context=2),
    "expert groups": Case(
        family="deepseek_v3", balance=0.3, routing="replay", values=FEW, experts=2, context=2
    ),
}
"""Cases of four ranks."""

AVERAGED = {"context": Case(values={**SMALL, "learning_rate": 1e-9}, context=2)}


def everything(ranks: Ranks) -> dict[str, Any]:
    """All that the ranks of the tests compute, in one group of processes."""
    cases = PAIRS if ranks.size == 2 else FOURS
    found: dict[str, Any] = {name: step(ranks, case) for name, case in cases.items()}
    found["averaged"] = averaged(ranks, AVERAGED["context"])
    if ranks.size == 2:
        found["spoiled"] = spoiled_step(ranks, AVERAGED["context"])
        found["bfloat16"] = step(ranks, Case(values=SMALL, context=2), torch.bfloat16)
        found["timeout"] = group_timeout(ranks)
        found["scores"] = scores(ranks)
        found["values"] = values(ranks)
        found["bytes"] = {mode: activation_bytes(ranks, mode) for mode in ("none", "full")}
    return found


def group_timeout(ranks: Ranks) -> float:
    """Longest wait in a context group, in seconds."""
    root = PolicyRoot(tiny_model())
    shard_policy(root, ranks, ParallelConfig(context=2, timeout_s=17.0), None)
    assert root.context is not None
    options: Any = root.context.group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())


def scores(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a frozen model."""
    root = PolicyRoot(tiny_model("gemma2").requires_grad_(False))
    if ranks.size > 1:
        ranks = shard_policy(root, ranks, ParallelConfig(context=2), None).ranks
    return score_tables(root, batch_of(Case()), Scoring(), 24, True, ranks)


def values(ranks: Ranks) -> dict[str, tuple[Tensor, float]]:
    """Values of both kinds of critics after an update, and the norm of its gradient."""
    found = {}
    for body in ("own", "policy"):
        policy, shards = PolicyRoot(tiny_model()), None
        sharing, whole_policy = ranks, tiny_model()
        if ranks.size > 1:
            shards = shard_policy(policy, ranks, ParallelConfig(context=2), None)
            sharing = shards.ranks
        critic = Critic(
            policy,
            CriticConfig(body=body, learning_rate=1e-2),
            TrainerConfig(max_tokens_per_microbatch=24),
            Scoring(),
            10,
            ranks=sharing,
            shards=shards,
            whole_policy=whole_policy,
        )
        batch = batch_of(Case()).with_(returns=torch.ones(()).expand(batch_of(Case()).mask.shape))
        metrics = critic.update(critic.score(batch), _squared)
        found[body] = (
            filled(critic.score(batch).values, "values"),
            number(metrics, "critic/grad_norm"),
        )
    return found


def _squared(batch: Batch, values: Tensor) -> LossOutput:
    assert batch.weights is not None and batch.returns is not None
    return LossOutput((batch.mask * (values - batch.returns) ** 2).sum())


def activation_bytes(ranks: Ranks, mode: str) -> int:
    """Bytes that the forward pass of one row keeps for its backward pass, without weights."""
    case = Case(model={"num_hidden_layers": 4}, values={"activation_checkpointing": mode})
    trainer = trainer_of(replace(case, context=2), ranks)
    batch = batch_of(Case(groups=12)).with_host()
    row = pack(batch, range(len(batch.tokens)), True)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not tensor.is_leaf:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = trainer.root(row, Scoring())
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    made.values.sum().backward()
    return total
