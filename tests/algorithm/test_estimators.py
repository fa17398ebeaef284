"""Bias and variance of the algorithms, proven on policies that can be enumerated. Expectations are
sums over every group that could be drawn, so there is no sampling error; the tolerance of 1e-6
covers the float32 denominators. A test that samples a run says so.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from enumerable import Toy, every_group, exact_gradient, moments, tree
from golden import batch_of
from torch import Tensor

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.entropy import sampled_entropy
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import final_rewards
from sixfold.trainer.logprobs import entropy_of

torch.set_num_threads(1)

LADDER = tree([(0,), (1, 0), (1, 1, 0), (1, 1, 1)])
"""Four completions, of 1, 2, 3 and 3 tokens."""
TILTED = torch.tensor([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.2]], dtype=torch.float64)
GRADED = torch.tensor([0.0, 1.0, 0.3, 2.0], dtype=torch.float64)
BINARY = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
RARE = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)


def _make(name: str, horizon: int = 8, **changes: Any) -> Composed:
    return Composed(replace(ZOO[name], **changes), horizon)


def _expected(algorithm: Composed, rewards: Tensor, k: int) -> Tensor:
    """[S V] the gradient that the algorithm makes on average of k completions of TILTED."""
    return moments(*every_group(algorithm, LADDER, TILTED, rewards, k))[0]


def _noise(algorithm: Composed, rewards: Tensor, k: int, theta: Tensor = TILTED) -> float:
    """Samples for a relative error of 1 about the algorithm's own mean: k Var / |mean|^2. Blind to
    the scale of the gradient.
    """
    mean, variance = moments(*every_group(algorithm, LADDER, theta, rewards, k))
    return k * variance / float(mean @ mean)


def _near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def _logit(p: float) -> Tensor:
    """Two one-token answers, the right one with probability p: theta [1, 2]."""
    return torch.tensor([[math.log(p / (1 - p)), 0.0]], dtype=torch.float64)


def test_the_toy_by_hand() -> None:
    """Probabilities sum to 1, the score by hand is autograd's, and all groups in one batch are each
    group in a batch of its own.
    """
    torch.testing.assert_close(
        LADDER.probability(TILTED).sum(), torch.tensor(1.0, dtype=torch.float64)
    )
    by_autograd = torch.autograd.functional.jacobian(LADDER.log_probs, TILTED).flatten(2)
    torch.testing.assert_close(LADDER.scores(TILTED), by_autograd)
    gradients, probability = every_group(_make("grpo"), LADDER, TILTED, GRADED, 2)
    assert float(probability.sum()) == pytest.approx(1.0)
    logp = LADDER.log_probs(TILTED.clone().requires_grad_())[[1, 3]]
    batch = LADDER.batch(torch.tensor([1, 3]), torch.tensor([0, 0]), logp, GRADED[[1, 3]])
    algorithm = _make("grpo")
    theta = TILTED.clone().requires_grad_()
    (alone,) = torch.autograd.grad(
        -algorithm.compute_loss(algorithm.prepare(batch), LADDER.log_probs(theta)[[1, 3]]).loss,
        theta,
    )
    _near(gradients[1 * 4 + 3], alone.flatten())


# Bias


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_reinforce_is_unbiased_at_any_number_of_samples(k: int) -> None:
    """Also with 2 added to every reward: a constant has no gradient."""
    for rewards in (GRADED, GRADED + 2.0):
        _near(_expected(_make("reinforce"), rewards, k), exact_gradient(LADDER, TILTED, GRADED))


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_group_mean_baseline_is_biased_by_one_over_k_and_leave_one_out_is_not(
    k: int,
) -> None:
    """The bias is exactly -1/K of the gradient; none for RLOO, which is K/(K-1) times
    centred in each of the 4^K groups.
    """
    exact = exact_gradient(LADDER, TILTED, GRADED)
    _near(_expected(_make("reinforce", advantage="group_mean"), GRADED, k) - exact, -exact / k)
    _near(8 * _expected(_make("dr_grpo"), GRADED, k), (k - 1) / k * exact)
    _near(_expected(_make("rloo"), GRADED, k), exact)
    centred, _ = every_group(_make("reinforce", advantage="group_mean"), LADDER, TILTED, GRADED, k)
    _near(every_group(_make("rloo"), LADDER, TILTED, GRADED, k)[0], k / (k - 1) * centred)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_on_right_or_wrong_the_z_score_changes_a_prompts_weight_and_not_its_direction(
    p: float, k: int
) -> None:
    """E[GRPO] = c grad p(right), c = E[std of a group] / (p (1 - p)): 1 at K = 2, toward 1 / sqrt(p
    (1 - p)) as K grows.
    """
    toy, right = tree([(0,), (1,)]), torch.tensor([1.0, 0.0], dtype=torch.float64)
    mean, _ = moments(*every_group(_make("grpo"), toy, _logit(p), right, k))
    std = sum(
        math.comb(k, n) * p**n * (1 - p) ** (k - n) * math.sqrt(n * (k - n)) / k
        for n in range(k + 1)
    )
    torch.testing.assert_close(
        mean, std / (p * (1 - p)) * exact_gradient(toy, _logit(p), right), rtol=1e-5, atol=0
    )


def test_zscore_favours_prompts_that_are_nearly_always_wrong() -> None:
    """The weight of a prompt solved one time in ten over that of one solved half the time. 1: what
    the expected reward asks for.
    """
    toy, right = tree([(0,), (1,)]), torch.tensor([1.0, 0.0], dtype=torch.float64)

    def weight(name: str, p: float, k: int) -> float:
        mean, _ = moments(*every_group(_make(name), toy, _logit(p), right, k))
        return float(mean[0] / exact_gradient(toy, _logit(p), right)[0])

    assert [weight("grpo", 0.1, k) / weight("grpo", 0.5, k) for k in (2, 3, 4, 8)] == pytest.approx(
        [1.0, 1.0, 1.046, 1.254], abs=2e-3
    )
    assert weight("dr_grpo", 0.1, 8) == pytest.approx(weight("dr_grpo", 0.5, 8), rel=1e-5)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_on_graded_rewards_the_z_score_turns_the_gradient_and_the_mean_over_tokens_turns_it_more(
    k: int,
) -> None:
    """Measured: cosine 0.988 to 0.991 for the z-score alone, 0.972 to 0.974 with 1 / |o|. The rare
    answer worth 2 counts for less than its worth.
    """
    exact = exact_gradient(LADDER, TILTED, GRADED)
    z_score = _expected(_make("reinforce", advantage="group_zscore"), GRADED, k)
    assert 0.985 < _cosine(z_score, exact) < 0.993
    assert 0.970 < _cosine(_expected(_make("grpo"), GRADED, k), exact) < 0.976
    assert z_score[5] / z_score[1] < exact[5] / exact[1], (
        "the logit of the token that earns the 2, beside that of the first token"
    )


# Variance


def test_the_error_of_a_batch_falls_as_one_over_the_root_of_its_samples() -> None:
    """L09: rms distance to the exact gradient is sigma / sqrt(K), sigma^2 = sum_c pi r^2
    |score|^2 - |g|^2 written out.
    """
    exact, score = exact_gradient(LADDER, TILTED, GRADED), LADDER.scores(TILTED).sum(1)
    sigma = (
        float(LADDER.probability(TILTED) @ (GRADED**2 * score.square().sum(-1)) - exact @ exact)
        ** 0.5
    )
    for k in (1, 2, 3, 4, 5):
        gradient, probability = every_group(_make("reinforce"), LADDER, TILTED, GRADED, k)
        error = float(probability @ (gradient - exact).square().sum(-1)) ** 0.5
        assert error == pytest.approx(sigma / k**0.5, rel=1e-6)


def test_baseline_removes_the_noise_of_a_constant_reward() -> None:
    for shift in (0.0, 2.0, -5.0):
        assert _noise(_make("rloo"), GRADED + shift, 4) == pytest.approx(
            _noise(_make("rloo"), GRADED, 4), rel=1e-5
        )
    assert _noise(_make("reinforce"), GRADED + 2.0, 4) > 7 * _noise(_make("reinforce"), GRADED, 4)


@pytest.mark.parametrize(
    ("rewards", "rloo", "z_score"),
    [(BINARY, 1.523, 1.563), (GRADED, 1.480, 1.971), (GRADED + 2.0, 11.67, 15.54)],
)
def test_reinforce_needs_more_samples_than_a_group_baseline_for_the_same_error(
    rewards: Tensor, rloo: float, z_score: float
) -> None:
    """Variance of REINFORCE divided by that of each baseline, exactly, for K = 4. GRPO also weighs
    by 1 / |o|, so its variance is even lower.
    """
    alone = _noise(_make("reinforce"), rewards, 4)
    assert alone / _noise(_make("rloo"), rewards, 4) == pytest.approx(rloo, rel=2e-3)
    assert alone / _noise(_make("dr_grpo"), rewards, 4) == pytest.approx(rloo, rel=2e-3)
    assert alone / _noise(
        _make("reinforce", advantage="group_zscore"), rewards, 4
    ) == pytest.approx(z_score, rel=2e-3)
    assert alone / _noise(_make("grpo"), rewards, 4) > z_score


def test_a_baseline_of_few_samples_is_itself_noise() -> None:
    """Two samples cost more than they save, and a right answer in ten leaves little to save: there
    REINFORCE is no worse.
    """
    for rewards in (BINARY, GRADED, RARE):
        assert _noise(_make("rloo"), rewards, 2) > _noise(_make("reinforce"), rewards, 2)
        falling = [_noise(_make("rloo"), rewards, k) for k in (2, 3, 4, 5)]
        assert falling == sorted(falling, reverse=True)
    assert _noise(_make("reinforce"), RARE, 4) / _noise(_make("rloo"), RARE, 4) == pytest.approx(
        1.0, abs=5e-3
    )


def test_opos_baseline_removes_most_variance_if_the_squared_score_grows_with_length() -> None:
    """Coins all the way: |score|^2 is half the length exactly. No other constant leaves less
    variance, and every constant leaves the mean alone.

    A group that holds every completion as often as it is drawn has the baseline of infinitely many
    samples.
    """
    fair, rows = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    score = LADDER.scores(fair).sum(1)[rows]
    torch.testing.assert_close(
        score.square().sum(-1), LADDER.lengths[rows] / 2.0, check_dtype=False
    )
    batch = LADDER.batch(rows, torch.zeros_like(rows), LADDER.log_probs(fair)[rows], GRADED[rows])

    def variance(name: str, off: float = 0.0) -> float:
        advantages = _make(name).prepare(batch).advantages
        assert advantages is not None
        mean, variance = moments(
            (advantages[:, 1:2] + off) * score, torch.full((8,), 1 / 8, dtype=torch.float64)
        )
        _near(mean, exact_gradient(LADDER, fair, GRADED))
        return variance

    assert variance("opo") < 0.9 * variance("dr_grpo") < variance("reinforce")
    assert variance("opo") < min(variance("opo", 0.01), variance("opo", -0.01))
    assert _noise(_make("opo"), GRADED, 4, fair) < _noise(_make("rloo"), GRADED, 4, fair), (
        "with the baseline of four samples too"
    )


# Length


@pytest.mark.parametrize(
    ("name", "scale", "short", "long"),
    [("grpo", 2, 0.05, 0.0025), ("dapo", 1, 0.5 / 210, 0.5 / 210), ("dr_grpo", 1000, 0.25, 0.25)],
)
def test_what_a_token_weighs_in_a_short_answer_and_a_long_one(
    name: str, scale: int, short: float, long: float
) -> None:
    """|A| = .5, answers of 10 and 200 tokens, d loss / d log-prob of each token. GRPO
    A / |o| (ours is the mean over the two sequences: half of it), DAPO A / all tokens, Dr. GRPO A /
    K (ours divides by the horizon too)."""
    mask = (torch.arange(201) >= 1) & (torch.arange(201) <= torch.tensor([[10], [200]]))
    logp = torch.full((2, 201), -1.0, dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        mask,
        logp.detach(),
        rewards=final_rewards(torch.tensor([1.0, 0.0], dtype=torch.float64), mask),
    )
    algorithm = _make(name, 1000, advantage="group_mean")
    algorithm.compute_loss(
        algorithm.prepare(batch.with_(truncated=torch.tensor([False, False]))), logp
    ).loss.backward()
    assert logp.grad is not None
    expected = torch.tensor([[-short], [long]], dtype=torch.float64) * mask
    torch.testing.assert_close(scale * logp.grad, expected, rtol=1e-6, atol=0)


def test_grpo_without_its_two_divisors_is_dr_grpo_group_by_group() -> None:
    """With std and |o| both off it is Dr. GRPO but for its constant, the horizon; with one
    of them off it is not.
    """

    def gradients(name: str, **changes: Any) -> Tensor:
        return every_group(_make(name, **changes), LADDER, TILTED, GRADED, 3)[0]

    dr_grpo = 8 * gradients("dr_grpo")
    _near(gradients("grpo", advantage="group_mean", aggregation="sequence-sum"), dr_grpo)
    assert not torch.allclose(gradients("grpo", advantage="group_mean"), dr_grpo, rtol=0.1)
    assert not torch.allclose(gradients("grpo", aggregation="sequence-sum"), dr_grpo, rtol=0.1)


def test_grpo_shortens_right_answers_and_lengthens_wrong_ones() -> None:
    """The first token decides, the second whether the answer stops (0) or goes on: its gradient is
    0, and Dr. GRPO's is.
    """
    toy = tree([(first, *rest) for first in (0, 1) for rest in ((0,), (1, 0), (1, 1))])
    theta = torch.zeros(toy.states, 2, dtype=torch.float64)
    right = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    after_right, after_wrong = (int(toy.state[n, 2]) for n in (0, 3))

    def stops(name: str) -> tuple[float, float]:
        gradient = moments(*every_group(_make(name), toy, theta, right, 4))[0].view(-1, 2)
        return float(gradient[after_right, 0]), float(gradient[after_wrong, 0])

    assert (
        exact_gradient(toy, theta, right).view(-1, 2)[[after_right, after_wrong]].abs().max()
        < 1e-12
    )
    assert stops("dr_grpo") == pytest.approx((0.0, 0.0), abs=1e-9) and stops(
        "rloo"
    ) == pytest.approx((0.0, 0.0), abs=1e-9)
    when_right, when_wrong = stops("grpo")
    assert when_right > 0.01 and when_wrong == pytest.approx(-when_right)


# DAPO


@pytest.mark.parametrize(
    ("name", "ratio", "flows"),
    [("dapo", 1.25, True), ("dapo", 1.3, False), ("grpo", 1.25, False), ("grpo", 1.15, True)],
)
def test_a_token_of_positive_advantage_moves_until_the_upper_clip(
    name: str, ratio: float, flows: bool
) -> None:
    """A wrong answer in the same group, whose ratio is also above the band, keeps its gradient."""
    mask = torch.tensor([[False, True], [False, True]])
    old = torch.tensor([[0.0, -1.0], [0.0, -2.0]], dtype=torch.float64)
    batch = batch_of(mask, old, rewards=final_rewards([1.0, 0.0], mask)).with_(
        truncated=torch.tensor([False, False])
    )
    logp = (old + math.log(ratio)).requires_grad_()
    algorithm = _make(name)
    algorithm.compute_loss(algorithm.prepare(batch), logp).loss.backward()
    assert logp.grad is not None
    assert float(logp.grad[0, 1]) == (pytest.approx(-ratio / 2, rel=1e-5) if flows else 0.0)
    assert float(logp.grad[1, 1]) == pytest.approx(ratio / 2, rel=1e-5)


@pytest.mark.parametrize("truncated_only", [False, True])
def test_the_overlong_penalty_grows_linearly_from_its_threshold_to_the_limit(
    truncated_only: bool,
) -> None:
    """A reward of 1 is lowered by clamp((L - 12) / 8, 0, 1): limit 20, the last 40 %. For all
    answers, or only for those cut off.
    """
    lengths = torch.arange(1, 21)
    mask = (torch.arange(21) >= 1) & (torch.arange(21) <= lengths[:, None])
    cut_off = lengths % 2 == 0
    batch = batch_of(
        mask,
        torch.zeros(20, 21, dtype=torch.float64),
        torch.arange(20),
        rewards=final_rewards(torch.ones(20), mask),
    )
    algorithm = _make(
        "dapo",
        20,
        advantage="no_baseline",
        overlong_buffer=0.4,
        overlong_truncated_only=truncated_only,
    )
    advantages = algorithm.prepare(batch.with_(truncated=cut_off, lengths=lengths + 1)).advantages
    pays = cut_off | (not truncated_only)
    expected = [
        1 - min(max((n - 12) / 8, 0.0), 1.0) * float(p)
        for n, p in zip(lengths.tolist(), pays, strict=True)
    ]
    assert advantages is not None and advantages[:, 1].tolist() == pytest.approx(expected)
    assert expected[11] == 1 and expected[15] == 0.5 and expected[19] == 0


# Critic, off policy


def _values(toy: Toy, probability: Tensor, rewards: Tensor) -> Tensor:
    """[S] expected reward from each prefix on, if completions come with this probability [N]."""
    through = torch.stack(
        [((toy.state == s) & toy.mask).any(-1) for s in range(toy.states)]
    ).double()
    return through @ (probability * rewards) / (through @ probability)


def _vtrace_returns(sampler: Tensor, trainer: Tensor, values: Tensor) -> Tensor:
    """[N, T] what V-trace makes of every completion of `sampler`, for a critic that says `values`
    [S].
    """
    rows = torch.arange(4)
    batch = LADDER.batch(rows, rows, LADDER.log_probs(sampler), GRADED)
    batch = batch.with_(prox_logp=LADDER.log_probs(trainer), values=values[LADDER.state])
    returns = _make("ppo", advantage="vtrace").prepare(batch).returns
    assert returns is not None
    return returns


def test_v_trace_with_the_samplers_own_weights_is_plain_actor_critic() -> None:
    """The gradient equals that of PPO's GAE for lam 1 and less. It differs once the trainer has
    been updated.
    """
    rows = torch.arange(4)
    logp = LADDER.log_probs(TILTED)
    values = torch.tensor([0.4, 0.7, 1.1], dtype=torch.float64)[LADDER.state]
    batch = LADDER.batch(rows, rows, logp, GRADED).with_(values=values, prox_logp=logp)

    def gradient(advantage: str, lam: float, moved: float = 0.0) -> Tensor:
        algorithm, leaf = (
            _make("ppo", advantage=advantage, lam=lam, loss="policy_gradient"),
            logp.clone().requires_grad_(),
        )
        away = torch.where(LADDER.mask, moved * (LADDER.tokens - 0.5), 0.0)
        filled = algorithm.prepare(batch.with_(prox_logp=logp + away))
        return torch.autograd.grad(algorithm.compute_loss(filled, leaf).loss, leaf)[0]

    for lam in (1.0, 0.9, 0.0):
        _near(gradient("vtrace", lam), gradient("gae", lam))
        assert not torch.allclose(gradient("vtrace", lam, 0.3), gradient("gae", lam), rtol=1e-2)


def test_v_traces_values_settle_on_the_policy_between_sampler_and_trainer() -> None:
    """Espeholt et al. 2018, theorem 1: V of pi_bar(a|s) ~ min(mu(a|s), pi(a|s)), rho_bar = 1. A
    critic that regresses on the returns, each completion as often as mu draws it, gets there from
    anywhere; it is neither mu's value nor pi's."""
    trainer = torch.tensor([[-0.5, 0.6], [0.2, 0.9], [-1.0, 0.5]], dtype=torch.float64)
    drawn = LADDER.probability(TILTED)
    values = torch.zeros(3, dtype=torch.float64)
    for _ in range(60):
        returns = _vtrace_returns(TILTED, trainer, values)
        at = [(LADDER.state == s) & LADDER.mask for s in range(3)]
        values = torch.stack(
            [(drawn[:, None] * returns)[here].sum() / (drawn[:, None] * here).sum() for here in at]
        )
    between = torch.minimum(TILTED.log_softmax(-1), trainer.log_softmax(-1))
    torch.testing.assert_close(
        values, _values(LADDER, LADDER.probability(between), GRADED), rtol=1e-6, atol=1e-8
    )
    sampler, target = (
        float(_values(LADDER, LADDER.probability(t), GRADED)[0]) for t in (TILTED, trainer)
    )
    assert sampler + 0.1 < float(values[0]) < target - 0.1


# KL


PROXY = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
"""A verifier that can be fooled: completion 0 is right, completion 2 is wrong and pays twice as
much.
"""
REFERENCE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]], dtype=torch.float64)


def _trained(steps: int, **changes: Any) -> Tensor:
    """[N] probabilities after training from the reference on the expected gradient of REINFORCE
    with these changes, K = 1.
    """
    theta, algorithm = REFERENCE.clone(), _make("reinforce", **changes)
    for _ in range(steps):
        mean, _ = moments(*every_group(algorithm, LADDER, theta, PROXY, 1, REFERENCE))
        theta = theta + mean.view_as(theta)
    return LADDER.probability(theta)


@pytest.mark.nightly
@pytest.mark.slow
def test_without_a_kl_an_exploitable_reward_is_exploited_and_with_one_the_truth_holds() -> None:
    """With k1 in the reward, training ends at reference * exp(proxy / beta), normalised."""
    reference = LADDER.probability(REFERENCE)
    assert float(reference[0]) == pytest.approx(0.73, abs=0.01), (
        "right nearly three times in four before training"
    )
    free = _trained(300)
    assert float(free[0]) < 0.01 and float(free @ PROXY) > 1.98, (
        "the proxy is nearly all there is, the truth gone"
    )
    for beta, floor in ((1.0, 0.65), (2.0, 0.71)):
        held, tilted = _trained(300, beta=beta), reference * (PROXY / beta).exp()
        torch.testing.assert_close(held, tilted / tilted.sum(), rtol=1e-4, atol=1e-6)
        assert float(held[0]) > floor


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("kl", ["k2", "k3+", "k3-unbiased"])
def test_a_kl_in_the_loss_charges_each_token_for_its_own_step_only(kl: str) -> None:
    """The effect of a token on the KL of later tokens has no gradient: a prefix is tilted by the
    reward still to come and not by the KL still to come. At the same beta this holds the truth less
    firmly than k1 in the reward.
    """
    value, tilted = PROXY[3:4], torch.ones(4, dtype=torch.float64)
    for state in (
        2,
        1,
        0,
    ):  # from the last prefix back: token 0 ends with that prefix's answer, token 1 goes on
        worth = torch.cat([PROXY[state : state + 1], value])
        policy = (REFERENCE[state] + worth).softmax(-1)
        value = (policy @ worth)[None]
        tilted[state] *= policy[0]
        tilted[state + 1 :] *= policy[1]
    held = _trained(300, beta=1.0, kl=kl, kl_in="loss")
    torch.testing.assert_close(held, tilted, rtol=1e-4, atol=1e-6)
    assert 0.55 < float(held[0]) < float(_trained(300, beta=1.0)[0]) - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.2, 5.0])
def test_beta_steers_the_kl_to_its_target_from_either_side(start: float) -> None:
    """Sampled: 1,024 completions a step, seed 0; the mean of the exact KL per token over the last
    50 steps within 5 % of the target.
    """
    target, generator = 0.05, torch.Generator().manual_seed(0)
    theta, algorithm, measured = (
        REFERENCE.clone().requires_grad_(),
        _make("reinforce", beta=start, kl_target=target),
        [],
    )
    group = torch.arange(1024)
    for _ in range(300):
        table, anchor = LADDER.log_probs(theta), LADDER.log_probs(REFERENCE)
        drawn = table.detach().sum(-1).exp()
        measured.append(
            float(drawn @ (table.detach() - anchor).sum(-1) / (drawn @ LADDER.lengths.double()))
        )
        rows = torch.multinomial(drawn, 1024, replacement=True, generator=generator)
        batch = algorithm.prepare(
            LADDER.batch(rows, group, table[rows], PROXY[rows]).with_(ref_logp=anchor[rows])
        )
        (gradient,) = torch.autograd.grad(algorithm.compute_loss(batch, table[rows]).loss, theta)
        theta = (theta - 0.5 * gradient).detach().requires_grad_()
    assert sum(measured[-50:]) / 50 == pytest.approx(target, rel=0.05)
    assert (algorithm.steering.beta < start) == (start == 5.0)


# Entropy


def _average_sampled_entropy(toy: Toy, theta: Tensor, k: int) -> float:
    """Over every group of k completions, each as likely as it is."""
    logp, probability = toy.log_probs(theta), toy.probability(theta)
    groups = (list(group) for group in product(range(len(probability)), repeat=k))
    return sum(
        float(probability[group].prod() * sampled_entropy(logp[group], toy.mask[group]))
        for group in groups
    )


def test_the_sampled_entropy_is_the_policys_on_average() -> None:
    """Over all pairs of completions of one length, exactly; and 4,000 sampled, seed 0,
    within 4 standard errors.
    """
    toy = tree(list(product(range(3), repeat=2)))
    theta = torch.randn(
        toy.states, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    logp, probability = toy.log_probs(theta), toy.probability(theta)
    exact = (
        float(probability @ (entropy_of(theta.log_softmax(-1))[toy.state] * toy.mask).sum(-1)) / 2
    )
    assert _average_sampled_entropy(toy, theta, 2) == pytest.approx(exact, rel=1e-12)
    rows = torch.multinomial(
        probability, 4000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    spread = float(probability @ (logp.sum(-1) / 2 + exact).square()) ** 0.5
    assert abs(float(sampled_entropy(logp[rows], toy.mask[rows])) - exact) < 4 * spread / 4000**0.5


def test_sampled_entropy_bias_for_unequal_lengths_is_one_over_their_number() -> None:
    """All log-probs over all tokens is a ratio of sums, and the unlikely answers are the long ones
    here: too low by 0.07 to 0.09 over the number of rows. A step has hundreds."""
    drawn = LADDER.probability(TILTED)
    exact = float(
        drawn
        @ (entropy_of(TILTED.log_softmax(-1))[LADDER.state] * LADDER.mask).sum(-1)
        / (drawn @ LADDER.lengths.double())
    )
    off = [k * (exact - _average_sampled_entropy(LADDER, TILTED, k)) for k in (1, 2, 4)]
    assert 0.07 < off[0] < off[1] < off[2] < 0.09


PROMPTS, SAMPLES, ANSWERS = 64, 16, 16


def _entropy_after(**changes: Any) -> tuple[Tensor, float]:
    """(entropy of each prompt's policy, mean probability of a right answer) after 100 steps of
    GRPO, 8 epochs each, sampled with seed 0.

    Every prompt has 16 one-token answers, a quarter of them right, and logits of its own; the
    verifier pays right answers 55 times in 100, wrong ones 45. That is a token's lot in a long
    answer: what it is paid for is mostly the doing of others.
    """
    toy, generator = tree([(a,) for a in range(ANSWERS)]), torch.Generator().manual_seed(0)
    theta = torch.randn(
        PROMPTS, 1, ANSWERS, generator=generator, dtype=torch.float64
    ).requires_grad_()
    pays = 0.45 + 0.1 * (torch.rand(PROMPTS, ANSWERS, generator=generator) < 0.25)
    algorithm, group = _make("grpo", **changes), torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    optimizer = torch.optim.SGD([theta], lr=0.5 * PROMPTS)
    for _ in range(100):
        with torch.no_grad():
            rows = torch.multinomial(
                toy.probability(theta), SAMPLES, replacement=True, generator=generator
            ).flatten()
            old = toy.log_probs(theta)[group, rows]
        rewards = (torch.rand(len(rows), generator=generator) < pays[group, rows]).double()
        batch = algorithm.prepare(toy.batch(rows, group, old, rewards).with_(prox_logp=old))
        for _ in range(8):
            entropy = entropy_of(theta.log_softmax(-1))[group].expand_as(old) * batch.mask
            optimizer.zero_grad()
            algorithm.compute_loss(
                batch.with_(entropy=entropy), toy.log_probs(theta)[group, rows]
            ).loss.backward()
            optimizer.step()
    theta = theta.detach()
    right = (toy.probability(theta) * (pays > 0.5)).sum(-1).mean()
    return entropy_of(theta.log_softmax(-1))[:, 0], float(right)


@pytest.fixture(scope="module")
def symmetric() -> tuple[Tensor, float]:
    """Under a clip of 0.2 on both sides: the entropy has fallen from 2.3 to well under 1."""
    entropy, right = _entropy_after()
    assert float(entropy.mean()) < 0.8 and right > 0.75
    return entropy, right


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"clip_high": 0.28},
        {"entropy_rule": "kl-cov"},
        {"entropy_rule": "clip-cov"},
        {"entropy_bonus": 0.02},
    ],
    ids=["clip-higher", "kl-cov", "clip-cov", "bonus"],
)
def test_entropy_lasts_longer_than_under_the_symmetric_clip_alone(
    symmetric: tuple[Tensor, float], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same number of updates, higher by at least 3 standard errors of the difference over
    64 prompts; right answers lose at most 10 in 100.

    The covariance rules hold back 2 % here: the papers' share is one or two tokens of this step.
    What clip-higher gains shrinks as the verifier gets
    surer and is gone at 80 right in 100: then it is what is learned that concentrates the policy,
    not the clip.
    """
    monkeypatch.setattr("sixfold.algorithm.composed.KL_COV_FRACTION", 0.02)
    monkeypatch.setattr("sixfold.algorithm.composed.CLIP_COV_FRACTION", 0.02)
    alone, right = symmetric
    entropy, still_right = _entropy_after(**changes)
    gain = entropy - alone
    assert float(gain.mean()) > 3 * float(gain.std()) / PROMPTS**0.5
    assert still_right > right - 0.1
