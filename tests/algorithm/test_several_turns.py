"""Every algorithm on episodes of several turns: what the policy did not sample takes no part."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.returns import gae
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, collate, filled
from sixfold.types import Group, Reward, Task, Trajectory, Turn

torch.set_num_threads(1)
HORIZON = 8


def episode(sample: int, observed: bool, rng: random.Random) -> Trajectory:
    """One to three turns. Without `observed` the same replies follow each other directly."""
    tokens, letters, turns = [1, 2], "pp", []
    logp, version = [0.0, 0.0], [-1, -1]
    for number in range(1 + sample % 3):
        if number:
            between = rng.choice(["o", "ooo", "to", "tot"])
            if observed:
                tokens += [9] * len(between)
                letters += between
                logp += [0.0] * len(between)
                version += [-1] * len(between)
        n = rng.randint(1, 2)
        turns.append(Turn(len(tokens), len(tokens) + n, rng.choice([0.0, 0.5, 0.25])))
        tokens += [rng.randrange(3, 9) for _ in range(n)]
        letters += "s" * n
        logp += [rng.uniform(-3, -0.1) for _ in range(n)]
        version += [4] * n
    value = rng.choice([0.0, 1.0])
    parts = {"one": value, "two": rng.random()}
    return Trajectory(
        "t",
        sample,
        tokens,
        letters,
        logp,
        version,
        tuple(turns),
        outcome="turns" if sample == 2 else "ended",
        reward=Reward(value, parts),
    )


def batch_of(observed: bool) -> Batch:
    """Two groups of three. Tables that other roles fill are random, and NaN off the mask."""
    groups = [
        Group(
            Task(f"t{g}", "?"),
            [episode(k, observed, random.Random(f"{g}/{k}")) for k in range(3)],
            greedy=episode(3, observed, random.Random(f"{g}/greedy")),
        )
        for g in range(2)
    ]
    batch = collate(groups)
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randn(5, int(batch.mask.sum()), generator=generator, dtype=torch.float64)
    names = ("ref_logp", "prox_logp", "values", "entropy")
    tables = {
        name: spread(row.abs() if name == "entropy" else -row.abs(), batch.mask)
        for name, row in zip(names, sampled, strict=False)
    }
    return replace(
        batch, old_logp=batch.old_logp.double(), rewards=batch.rewards.double(), **tables
    )


def spread(values: Tensor, mask: Tensor) -> Tensor:
    return torch.full(mask.shape, torch.nan, dtype=torch.float64).masked_scatter(mask, values)


VARIANTS: list[dict[str, Any]] = [
    {"overlong_buffer": 0.5},
    {"overlong_buffer": 0.5, "overlong_truncated_only": True},
    *({"length_penalty": how} for how in ("kimi", "cosine", "stop-properly")),
    {"advantage": "process"},
    {"beta": 0.1, "kl": "k1", "kl_in": "reward"},
    {"beta": 0.1},
    {"entropy_bonus": 0.01},
]
ALL = [Composed(row, HORIZON) for row in ZOO.values()] + [
    Composed(replace(ZOO["grpo"], **changes), HORIZON) for changes in VARIANTS
]


def prepared(algorithm: Composed, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """(prepared batch, loss, its gradient [B, T] with respect to log-probs)."""
    algorithm = deepcopy(algorithm)
    batch = algorithm.prepare(batch)
    moved = torch.linspace(-0.4, 0.4, int(batch.mask.sum()), dtype=torch.float64)
    # The trainer's log-probs are 0 where nothing was sampled.
    logp = torch.where(batch.mask, batch.old_logp, 0.0).masked_scatter(
        batch.mask, batch.old_logp[batch.mask] + moved
    )
    logp.requires_grad_()
    loss = algorithm.compute_loss(batch, logp).loss
    loss.backward()
    assert logp.grad is not None
    return batch, loss.detach(), logp.grad


@pytest.mark.parametrize("algorithm", ALL, ids=range(len(ALL)))
def test_observations_change_neither_advantages_nor_loss_nor_gradient(algorithm: Composed) -> None:
    """With and without observations between the replies, every sampled token has the same
    advantage, weight and gradient. Other tokens have none.
    """
    with_, loss, gradient = prepared(algorithm, batch_of(observed=True))
    without, alone, expected = prepared(algorithm, batch_of(observed=False))
    assert with_.tokens.shape[1] > without.tokens.shape[1]
    assert loss.isfinite() and bool(gradient.isfinite().all())
    assert bool((gradient[~with_.mask] == 0).all())
    assert bool(gradient[with_.mask].any())
    torch.testing.assert_close(loss, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient[with_.mask], expected[without.mask], rtol=1e-9, atol=1e-9)
    for name in ("advantages", "weights", "returns", "correction", "marked"):
        table, other = getattr(with_, name), getattr(without, name)
        assert (table is None) == (other is None)
        if table is not None:
            torch.testing.assert_close(table[with_.mask], other[without.mask])
    weights = filled(with_.weights, "weights")
    assert bool((weights[~with_.mask] == 0).all())


def test_the_value_of_the_next_sampled_token_follows_across_turns() -> None:
    """GAE by hand, gamma = lambda = 1/2. Replies at tokens 1 and 4 with rewards 1 and 2; values 0.5
    and 1 there. delta_4 = 2 - 1 = 1; delta_1 = 1 + 1/2 - 1/2 = 1; A_1 = 1 + 1/4.
    """
    t = Trajectory(
        "t",
        0,
        [1, 5, 9, 9, 6, 9],
        "psotso",
        [0.0, -1.0, 0.0, 0.0, -1.0, 0.0],
        [-1, 0, -1, -1, 0, -1],
        (Turn(1, 2, 1.0), Turn(4, 5)),
        reward=Reward(2.0),
    )
    batch = collate([Group(Task("t", "?"), [t])])
    values = torch.tensor([[7.0, 0.5, 7.0, 7.0, 1.0, 7.0]])
    advantages, returns = gae(batch.rewards, values, batch.mask, 0.5, 0.5)
    assert advantages.tolist() == [[0, 1.25, 0, 0, 1.0, 0]]
    assert returns.tolist() == [[0, 1.75, 0, 0, 2.0, 0]]
