"""Critic and policy in turn: the warm-up leaves the policy bit-identical, then it trains as it
would alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.critic.critics import (
    BODIES,
    make_actor,
    make_critic,
    policy_gradient,
    ragged,
    same,
    squared_error,
    weights_of,
)
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, Loss, LossOutput, filled
from sixfold.critic.actor_critic import ActorCritic

Tiny = Callable[[str], PreTrainedModel]


class Objective:
    """Every scored token teaches the critic, whatever it weighs in the policy's loss."""

    def __init__(self, loss: Loss = squared_error) -> None:
        self.loss = loss

    def value_batch(self, batch: Batch) -> Batch:
        return batch.with_(weights=batch.mask / batch.mask.sum())

    def compute_value_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        return self.loss(batch, values)


def pair(policy: PreTrainedModel, body: str, warmup: int) -> ActorCritic:
    return ActorCritic(make_actor(policy), make_critic(policy, body), Objective(), warmup)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("body", BODIES)
def test_in_the_warm_up_only_the_critic_learns(body: str, tiny: Tiny) -> None:
    policy = copy.deepcopy(tiny("qwen3"))
    both, before = pair(policy, body, warmup=2), weights_of(policy)
    losses = []
    for step in (1, 2):
        metrics = both.train_step(both.critic.score(ragged()), policy_gradient)
        losses.append(metrics["critic/loss"])
        assert (
            same(weights_of(policy), before)
            and not both.optimizer.state
            and all(p.grad is None for p in policy.parameters())
        )
        assert (
            metrics["train/skipped"],
            metrics["train/updates"],
            metrics["train/skipped_total"],
        ) == (1.0, 0.0, 0.0)
        assert (both.version, both.steps, both.skipped_total) == (0, 0, 0)
        assert both.skip_reason == f"only the critic learns, warm-up step {step} of 2"
    assert losses[1] < losses[0]  # type: ignore[operator]
    metrics = both.train_step(both.critic.score(ragged()), policy_gradient)
    assert not same(weights_of(policy), before)
    assert (metrics["train/skipped"], both.version, both.steps, both.skip_reason) == (0.0, 1, 1, "")


def test_the_warm_up_goes_on_where_a_checkpoint_left_it(tiny: Tiny) -> None:
    policy = copy.deepcopy(tiny("qwen3"))
    first = pair(policy, "policy", warmup=2)
    batch = first.critic.score(ragged())
    first.train_step(batch, policy_gradient)
    second = pair(policy, "policy", warmup=2)
    second.critic.load(first.critic.tensors(), first.critic.state())
    assert [second.train_step(batch, policy_gradient)["train/skipped"] for _ in range(2)] == [
        1.0,
        0.0,
    ]


@pytest.mark.slow
def test_the_policy_learns_as_it_would_alone(tiny: Tiny) -> None:
    """A critic of its own body changes nothing of the policy's update: weights and metrics are
    those of the plain trainer.
    """
    policy, alone = copy.deepcopy(tiny("qwen3")), copy.deepcopy(tiny("qwen3"))
    both, plain = pair(policy, "own", warmup=0), make_actor(alone)
    for step in range(2):
        batch = both.critic.score(ragged(step))
        metrics, expected = (
            both.train_step(batch, policy_gradient),
            plain.train_step(batch, policy_gradient),
        )
        assert {k: v for k, v in metrics.items() if not k.startswith("critic/")} == expected
    assert same(weights_of(policy), weights_of(alone)) and both.version == plain.version == 2


def test_the_critic_learns_from_the_features_that_its_values_were_made_of(tiny: Tiny) -> None:
    """A head on the policy sees, in its update, the very values it gave at collection: the policy
    has not moved yet.
    """
    policy, seen = copy.deepcopy(tiny("qwen3")), list[float]()

    def watched(local: Batch, values: Tensor) -> LossOutput:
        seen.append(
            float((values.detach() - filled(local.values, "values"))[local.mask].abs().max())
        )
        return squared_error(local, values)

    both = ActorCritic(make_actor(policy), make_critic(policy, "policy"), Objective(watched), 0)
    for step in range(3):
        both.train_step(both.critic.score(ragged(step)), policy_gradient)
    assert max(seen) < 1e-5 and any(bool(p.any()) for p in both.critic.model.parameters())


def test_a_batch_that_cannot_move_the_policy_still_teaches_the_critic(tiny: Tiny) -> None:
    """Advantages of 0 everywhere: the policy's weights are all 0, the critic has its own."""
    policy = copy.deepcopy(tiny("qwen3"))
    both, before = pair(policy, "own", warmup=0), weights_of(policy)
    batch = both.critic.score(ragged())
    metrics = both.train_step(batch.with_(weights=torch.zeros(batch.mask.shape)), policy_gradient)
    assert same(weights_of(policy), before)
    assert (metrics["train/skipped"], metrics["critic/skipped"], both.critic.trainer.version) == (
        1.0,
        0.0,
        1,
    )


def test_skip_reason_of_the_policy_is_passed_on(tiny: Tiny) -> None:
    both = pair(copy.deepcopy(tiny("qwen3")), "policy", warmup=0)
    batch = both.critic.score(ragged())
    metrics = both.train_step(batch, lambda rows, logp: LossOutput(logp.sum() * float("nan")))
    assert metrics["train/skipped"] == 1.0 and metrics["critic/skipped"] == 0.0
    assert both.skip_reason == both.actor.skip_reason and both.skip_reason.startswith(
        "loss not finite in rows"
    )
    assert (both.version, both.steps, both.skipped_total) == (0, 1, 1)
    both.train_step(batch, policy_gradient)
    assert both.skip_reason == ""
