"""A value baseline does not change the mean of the policy gradient and lowers its variance. Both
are summed exactly over all completions.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from tests.conftest import make_tiny
from tests.critic.critics import make_critic, squared_error, trajectory
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.algorithm.losses import policy_gradient
from sixfold.batch import Batch, collate
from sixfold.model.attention import NAME
from sixfold.trainer.logprobs import Scoring, score_batch
from sixfold.types import Group, Task

VOCABULARY, PROMPT = 4, [1]


def toy() -> PreTrainedModel:
    """A policy over sequences of two tokens from four: sixteen completions. GPT-2, for its
    positions: rotary ones alone cannot tell 1 from 1, 1.
    """
    policy = make_tiny("gpt2", vocab_size=VOCABULARY, n_embd=16, bos_token_id=None)
    policy.set_attn_implementation(NAME)
    return policy


def reward(a: int, b: int) -> float:
    return 2.0 + (a == 2) + 0.5 * (a == b)


def everything() -> Batch:
    """Every completion once, with its reward."""
    rows = [
        trajectory("t", i, PROMPT, [a, b], [True, True], reward(a, b))
        for i, (a, b) in enumerate(product(range(VOCABULARY), repeat=2))
    ]
    return collate([Group(Task("t", "?"), rows)])


def gradients(policy: PreTrainedModel, batch: Batch, advantages: Tensor) -> Tensor:
    """[completions, parameters] gradient of the policy-gradient loss of each completion,
    float64.
    """
    policy = copy.deepcopy(policy).double()
    policy.set_attn_implementation("eager")
    found = []
    for b in range(len(batch.tokens)):
        policy.zero_grad()
        logp = (
            policy(batch.tokens[b : b + 1], use_cache=False)
            .logits.log_softmax(-1)[:, :-1]
            .gather(-1, batch.tokens[b : b + 1, 1:, None])[:, :, 0]
        )
        policy_gradient(logp, advantages[b : b + 1, 1:].double()).sum().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    return torch.stack(found)


def moments(gradient: Tensor, probability: Tensor) -> tuple[Tensor, float]:
    """Exact mean [parameters] and total variance of a gradient drawn with these probabilities."""
    mean = (probability[:, None] * gradient).sum(0)
    return mean, float((probability[:, None] * (gradient - mean).square()).sum())


@pytest.fixture(scope="module")
def world() -> tuple[PreTrainedModel, Batch, Tensor]:
    policy, batch = toy(), everything()
    probability = score_batch(policy, batch, Scoring(), 10**6, True).double().sum(-1).exp()
    assert float(probability.sum()) == pytest.approx(1, abs=1e-6)
    return policy, batch, probability / probability.sum()


def true_values(batch: Batch, probability: Tensor) -> Tensor:
    """V(prompt) and V(prompt, first token), by enumeration; [completions, T]."""
    values = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    values[:, 1] = (probability * batch.scores).sum()
    for a in range(VOCABULARY):
        rows = batch.tokens[:, 1] == a
        values[rows, 2] = (probability * batch.scores)[rows].sum() / probability[rows].sum()
    return values


def test_the_true_value_lowers_the_variance_and_keeps_the_mean(
    world: tuple[PreTrainedModel, Batch, Tensor],
) -> None:
    policy, batch, probability = world
    returns = batch.scores[:, None] * batch.mask
    mean, variance = moments(gradients(policy, batch, returns), probability)
    mean_v, variance_v = moments(
        gradients(policy, batch, returns - true_values(batch, probability)), probability
    )
    torch.testing.assert_close(mean_v, mean, rtol=0, atol=1e-6 * float(mean.abs().max()) + 1e-6)
    assert variance_v < 0.1 * variance


@pytest.mark.nightly
@pytest.mark.slow
def test_learned_value_also_lowers_the_variance(
    world: tuple[PreTrainedModel, Batch, Tensor],
) -> None:
    """Regression on returns, each completion as often as the policy samples it, finds V; and any
    function of the state leaves the mean alone.
    """
    policy, batch, probability = world
    returns = (batch.scores[:, None] * batch.mask).float()
    batch = batch.with_(returns=returns, weights=probability[:, None].float() * batch.mask)
    critic = make_critic(policy, "own", rate=3e-3)
    variances, means = [], []
    for updates in (0, 30, 170):
        for _ in range(updates):
            critic.update(critic.score(batch), squared_error)
        values = critic.score(batch).values
        assert values is not None
        mean, variance = moments(gradients(policy, batch, returns - values), probability)
        means.append(mean)
        variances.append(variance)
    truth = true_values(batch, probability)
    torch.testing.assert_close(values.double(), truth, rtol=0, atol=0.05)
    assert variances[2] < 0.1 * variances[0] and variances[2] < variances[1] < variances[0]
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=0, atol=1e-5)
