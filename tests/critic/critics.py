"""Batches for the critic's tests: ragged groups, tool output inside completions, and made-up
returns; and the plainest value loss.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.made_trajectories import from_mask
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, LossOutput, collate, filled
from sixfold.critic.critic import Critic
from sixfold.recipe.schema import CriticConfig, TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory

BODIES = ("own", "policy")


def trajectory(
    task: str,
    sample: int,
    prompt: list[int],
    completion: list[int],
    sampled: list[bool],
    reward: float | None,
) -> Trajectory:
    mask = [False] * len(prompt) + sampled
    return from_mask(
        task,
        sample,
        prompt + completion,
        len(prompt),
        mask,
        logp=[-2.0 * m for m in mask],
        reward=Reward(reward),
    )


def ragged(seed: int = 0, groups: int = 3, samples: int = 4, vocabulary: int = 60) -> Batch:
    """Groups with prompts of unlike length (one of a single token), completions of 1 to 12 tokens,
    some with tokens that were not sampled; every sampled token weighs the same, and its return is
    the share of even tokens in the text before it.
    """
    rng = random.Random(seed)
    made = []
    for g in range(groups):
        prompt = [rng.randrange(2, vocabulary) for _ in range(1 if g == 0 else rng.randint(2, 9))]
        rows = []
        for k in range(samples):
            n = 1 if k == 0 else rng.randint(2, 12)
            sampled = [True] + [rng.random() < 0.7 if k % 2 else True for _ in range(n - 1)]
            rows.append(
                trajectory(
                    f"t{g}",
                    k,
                    prompt,
                    [rng.randrange(2, vocabulary) for _ in range(n)],
                    sampled,
                    float(k % 2),
                )
            )
        made.append(Group(Task(f"t{g}", "?"), rows))
    batch = collate(made)
    even = (batch.tokens % 2 == 0).float()
    before = (even.cumsum(-1) - even) / torch.arange(even.shape[1]).clamp_min(1)
    return batch.with_(
        weights=batch.mask / batch.mask.sum(), returns=torch.where(batch.mask, before, 0.0)
    )


def squared_error(batch: Batch, values: Tensor) -> LossOutput:
    """The weighted sum of 1/2 (V - R)^2."""
    error = torch.where(
        batch.mask,
        0.5
        * (values - filled(batch.returns, "returns")).square()
        * filled(batch.weights, "weights"),
        0.0,
    )
    return LossOutput(
        error.sum(),
        {"critic/absolute_error": error.detach().sum(), "critic/loss": error.detach().sum()},
    )


def policy_gradient(batch: Batch, logp: Tensor) -> LossOutput:
    """-A log pi with each row's reward for its advantage."""
    loss = -torch.where(
        batch.mask, logp * batch.scores[:, None] * filled(batch.weights, "weights"), 0.0
    ).sum()
    return LossOutput(loss, {"train/loss": loss.detach()})


def settings(**values: Any) -> TrainerConfig:
    return TrainerConfig(
        **{"learning_rate": 1e-2, "grad_clip": 1e9, "max_tokens_per_microbatch": 64} | values
    )


def make_critic(
    policy: PreTrainedModel, body: str, rate: float = 1e-2, epochs: int = 1, **values: Any
) -> Critic:
    config = CriticConfig(body=body, learning_rate=rate)  # type: ignore[arg-type]
    return Critic(
        PolicyRoot(policy), config, settings(**values), Scoring(chunk=16), 100, epochs=epochs
    )


def make_actor(policy: PreTrainedModel, **values: Any) -> Trainer:
    return Trainer(PolicyRoot(policy), settings(**values), Scoring(chunk=16), 100)


def randomise_head(critic: Critic) -> None:
    """A head away from zero, where values tell states apart."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in critic.model.named_parameters():
            if name.startswith(("score", "classifier")):
                p.copy_(torch.randn(p.shape, generator=generator))


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
