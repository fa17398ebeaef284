"""PPO as the loop runs it: values before the algorithm, then critic and policy on what the
algorithm made of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.critic.critics import BODIES, make_actor, make_critic, ragged
from transformers import PreTrainedModel

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import filled
from sixfold.critic.actor_critic import ActorCritic

Tiny = Callable[[str], PreTrainedModel]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_the_critic_learns_the_returns_that_gae_makes_of_its_values(body: str, tiny: Tiny) -> None:
    """At first V is 0, so the return of a token is lam^(sampled tokens after it) times the row's
    reward, and the loss half its mean square.

    A row whose checker failed has no part in that. Later steps on the same samples explain more of
    the returns.
    """
    policy = copy.deepcopy(tiny("qwen3"))
    algorithm = make_algorithm(replace(ZOO["ppo"], epochs=1, gamma=1.0, lam=0.9), 16)
    both = ActorCritic(
        make_actor(policy, learning_rate=1e-4),
        make_critic(policy, body, rate=3e-3 if body == "own" else 0.1),
        algorithm,
        0,
    )
    samples = ragged()
    rewards = samples.rewards.clone()
    rewards[3, int(samples.lengths[3]) - 1] = float("nan")
    samples = replace(samples, rewards=rewards, weights=None, returns=None)
    known = [b for b in range(12) if b != 3]
    expected = {
        (b, t): float(samples.scores[b]) * 0.9 ** int(samples.mask[b, t + 1 :].sum())
        for b, t in samples.mask.nonzero().tolist()
        if b in known
    }

    made = []
    for _ in range(30):
        batch = algorithm.prepare(both.critic.score(samples))
        made.append(both.train_step(batch, algorithm.compute_loss))
        if len(made) == 1:
            returns = filled(batch.returns, "returns")
            assert {at: float(returns[at]) for at in expected} == pytest.approx(expected, rel=1e-5)
    first, last = made[0], made[-1]
    assert first["critic/loss"] == pytest.approx(
        sum(0.5 * r**2 for r in expected.values()) / len(expected), rel=1e-5
    )
    assert (first["critic/value_mean"], first["critic/explained_variance"]) == (0.0, 0.0)
    assert (
        first["critic/skipped"] == first["train/skipped"] == 0.0
        and both.version == both.critic.trainer.version == 30
    )
    assert last["critic/explained_variance"] > 0.3  # type: ignore[operator]
    assert torch.isfinite(
        torch.tensor([float(v) for m in made for k, v in m.items() if k.startswith("critic/")])
    ).all()  # type: ignore[arg-type]
