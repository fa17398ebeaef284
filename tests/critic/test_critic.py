"""The critic learns: regression converges, the split does not matter, a checkpoint brings it back
bit for bit, and its metrics are what they say.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from tests.critic.critics import (
    BODIES,
    make_critic,
    ragged,
    randomise_head,
    same,
    squared_error,
    weights_of,
)
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, LossOutput
from sixfold.critic.critic import Critic, explained_variance
from sixfold.errors import UserError

Tiny = Callable[[str], PreTrainedModel]
NAN = float("nan")


def number(metrics: object, key: str) -> float:
    assert isinstance(metrics, dict)
    return float(metrics[key])


# --- learning


@pytest.mark.slow
def test_regression_converges_and_explains_the_returns(tiny: Tiny) -> None:
    """A fixed target that is a function of the state: the loss falls tenfold within 100 updates and
    the explained variance rises towards 1.
    """
    critic, batch = make_critic(tiny("qwen3"), "own", rate=3e-3, grad_clip=1.0), ragged(groups=4)
    made = []
    for _ in range(60):
        made.append(critic.update(critic.score(batch), squared_error))
        if number(made[-1], "critic/loss") < 0.01 * number(made[0], "critic/loss"):
            break
    assert number(made[-1], "critic/loss") < 0.1 * number(made[0], "critic/loss")
    assert made[0]["critic/explained_variance"] == 0.0, (
        "a critic that says 0 everywhere explains nothing"
    )
    assert number(made[-1], "critic/explained_variance") > 0.8


@pytest.mark.nightly
@pytest.mark.slow
def test_a_head_alone_learns_what_is_linear_in_the_policys_features(tiny: Tiny) -> None:
    critic, teacher, batch = (
        make_critic(tiny("qwen3"), "policy", rate=0.1),
        make_critic(tiny("qwen3"), "policy"),
        ragged(groups=4),
    )
    randomise_head(teacher)
    batch = batch.with_(returns=teacher.score(batch).values)  # type: ignore[arg-type]
    made = [critic.update(critic.score(batch), squared_error) for _ in range(100)]
    assert number(made[-1], "critic/loss") < 0.1 * number(made[0], "critic/loss")
    assert (
        number(made[-1], "critic/explained_variance")
        > 0.9
        > 0.5
        > abs(number(made[0], "critic/explained_variance"))
    )


def gradient(critic: Critic, batch: Batch) -> Tensor:
    """Of one update: AdamW's first moment after its first step is (1 - beta 1) times it."""
    assert critic.update(batch, squared_error)["critic/skipped"] == 0.0
    state = critic.trainer.optimizer.state
    return torch.cat([state[p]["exp_avg"].flatten() for p in critic.model.parameters()]) / (
        1 - critic.trainer.config.betas[0]
    )


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the Euclidean norm."""
    return float((a - b).norm() / b.norm())


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("body", BODIES)
def test_any_split_into_microbatches_gives_the_same_gradient(body: str, tiny: Tiny) -> None:
    gradients = []
    for tokens, share in ((10**6, True), (10**6, False), (40, True), (16, False)):
        critic = make_critic(
            tiny("qwen3"), body, max_tokens_per_microbatch=tokens, share_prefix=share
        )
        randomise_head(critic)
        gradients.append(gradient(critic, critic.score(ragged())))
    assert float(gradients[0].norm()) > 0.1
    for other in gradients[1:]:
        assert relative(other, gradients[0]) < 1e-5


def test_the_gradient_is_that_of_the_plain_forward(tiny: Tiny) -> None:
    critic, batch = make_critic(tiny("gpt2"), "own", max_tokens_per_microbatch=40), ragged()
    randomise_head(critic)
    model = copy.deepcopy(critic.model)
    assert isinstance(model, PreTrainedModel)
    model.set_attn_implementation("eager")
    for b, n in enumerate(batch.lengths.tolist()):
        values = model(batch.tokens[b : b + 1, :n], use_cache=False).logits[:, :-1, 0]
        row = batch.rows(torch.tensor([b]))
        padded = torch.zeros(1, batch.tokens.shape[1])
        padded[:, 1:n] = values
        squared_error(row, padded).loss.backward()
    expected = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
    assert relative(gradient(critic, critic.score(batch)), expected) < 1e-5


def test_epochs_are_passes_over_the_batch_with_its_own_learning_rate(tiny: Tiny) -> None:
    critic = make_critic(tiny("qwen3"), "own", rate=3e-3, epochs=3, learning_rate=0.5)
    batch = critic.score(ragged()).with_(minibatch=torch.arange(12) % 2)
    metrics = critic.update(batch, squared_error)
    assert (critic.batches, critic.trainer.version, metrics["critic/learning_rate"]) == (1, 6, 3e-3)


# --- what it says of itself


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], 1.0),  # an offset is not variance: value_mean shows it
        ([4.0, 4.0, 4.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),  # R - V = -2, 0, 2: variance 8/3 against 2/3
        ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0], 0.5),  # R - V = 0, 1, 0, 1: 1/4 against 1/2
        ([0.3, 0.9, -2.0], [0.7, 0.7, 0.7], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance_by_hand(
    values: list[float], returns: list[float], expected: float
) -> None:
    assert explained_variance(torch.tensor(values), torch.tensor(returns)) == pytest.approx(
        expected, abs=1e-12
    )


def test_metrics_speak_of_values_at_collection_on_scored_tokens_with_a_reward(tiny: Tiny) -> None:
    critic, batch = make_critic(tiny("qwen3"), "own"), ragged()
    randomise_head(critic)
    rewards = batch.rewards.clone()
    rewards[5, int(batch.lengths[5]) - 1] = NAN
    weights, returns = batch.weights, batch.returns
    assert weights is not None and returns is not None
    weights, returns = weights.clone(), returns.clone()
    weights[5], returns[5] = 0.0, NAN
    batch = critic.score(
        batch.with_(rewards=rewards, weights=weights, returns=torch.where(batch.mask, returns, 1e9))
    )
    metrics = critic.update(batch, squared_error)
    pairs = [
        (float(batch.values[b, t]), float(batch.returns[b, t]))  # type: ignore[index]
        for b, t in batch.mask.nonzero().tolist()
        if b != 5
    ]
    count = len(pairs)
    mean_v, mean_r = (sum(column) / count for column in zip(*pairs, strict=True))
    mean_gap = mean_r - mean_v
    unexplained = sum((r - v - mean_gap) ** 2 for v, r in pairs) / count
    variance = sum((r - mean_r) ** 2 for _, r in pairs) / count
    assert metrics["critic/value_mean"] == pytest.approx(mean_v, rel=1e-9)
    assert metrics["critic/explained_variance"] == pytest.approx(
        1 - unexplained / variance, rel=1e-9
    )
    expected = sum(0.5 * (r - v) ** 2 for v, r in pairs) / int(batch.mask.sum())
    assert (
        metrics["critic/loss"]
        == metrics["critic/absolute_error"]
        == pytest.approx(expected, rel=1e-5)
    )
    assert number(metrics, "critic/grad_norm") > 0 and metrics["critic/skipped"] == 0.0
    names = ("loss", "absolute_error", "grad_norm", "learning_rate", "skipped")
    assert metrics.keys() == {
        f"critic/{name}" for name in (*names, "explained_variance", "value_mean")
    }, "a policy's metric of the same name would be overwritten"


def test_batch_with_zero_weights_gives_no_gradient(tiny: Tiny) -> None:
    critic = make_critic(tiny("qwen3"), "own")
    before, batch = weights_of(critic.model), critic.score(ragged())
    metrics = critic.update(batch.with_(weights=torch.zeros(batch.mask.shape)), squared_error)
    assert same(weights_of(critic.model), before) and metrics["critic/skipped"] == 1.0
    assert "critic/loss" not in metrics and "critic/grad_norm" not in metrics


def test_a_loss_that_is_not_finite_leaves_the_critic_alone(tiny: Tiny) -> None:
    critic = make_critic(tiny("qwen3"), "own")
    before, batch = weights_of(critic.model), critic.score(ragged())
    metrics = critic.update(batch, lambda rows, values: LossOutput(values.sum() * math.inf))
    assert same(weights_of(critic.model), before) and metrics["critic/skipped"] == 1.0
    assert critic.trainer.version == 0


def test_it_must_be_scored_and_given_returns_first(tiny: Tiny) -> None:
    critic, batch = make_critic(tiny("qwen3"), "policy"), ragged()
    with pytest.raises(ValueError, match=r"batch\.values is not filled in"):
        critic.update(batch, squared_error)


# --- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_a_checkpoint_brings_it_back_bit_for_bit(body: str, tiny: Tiny) -> None:
    """Three updates, saved; two more. A fresh critic with the checkpoint loaded makes the
    same two.
    """
    policy = tiny("qwen3")
    critic = make_critic(policy, body, warmup_steps=10)
    for step in range(3):
        critic.update(critic.score(ragged(step)), squared_error)
    tensors = {name: t.detach().clone() for name, t in critic.tensors().items()}
    state = critic.state()
    other = make_critic(policy, body, warmup_steps=10)
    pointers = [p.data_ptr() for p in other.model.parameters()]
    other.load(tensors, state)
    assert same(
        weights_of(other.model),
        {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")},
    )
    assert other.state() == state and state["batches"] == state["version"] == 3
    ends = []
    for c in (critic, other):
        ends.append([c.update(c.score(ragged(step)), squared_error) for step in (3, 4)])
    assert ends[0] == ends[1] and same(weights_of(critic.model), weights_of(other.model))
    assert number(ends[0][1], "critic/learning_rate") == pytest.approx(
        5e-3
    )  # the schedule went on at update 5 of 10
    assert [p.data_ptr() for p in other.model.parameters()] == pointers


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "weights/score.* is in the run but not in the checkpoint"),
        ({"weights/score.weight": torch.ones(1, 64)}, "is in the run but not in the checkpoint"),
    ],
)
def test_a_checkpoint_without_it_is_refused(
    tensors: dict[str, Tensor], reason: str, tiny: Tiny
) -> None:
    critic = make_critic(tiny("qwen3"), "policy")
    with pytest.raises(UserError, match=reason):
        critic.load(tensors, critic.state())
    assert not any(p.any() for p in critic.model.parameters())


def test_a_checkpoint_of_the_other_form_is_refused(tiny: Tiny) -> None:
    own, head = make_critic(tiny("qwen3"), "own"), make_critic(tiny("qwen3"), "policy")
    for saved, critic in ((own, head), (head, own)):
        before = weights_of(critic.model)
        with pytest.raises(UserError, match="checkpoint"):
            critic.load(saved.tensors(), saved.state())
        assert same(weights_of(critic.model), before)
