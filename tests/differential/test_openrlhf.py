"""Our pure functions against OpenRLHF's losses, KL estimators, reward shaping and experience maker,
called: values and gradients.
"""

from __future__ import annotations

from math import exp, sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.algorithm import advantages, kl, losses, off_policy, returns, sequence_losses, shaping
from sixfold.trainer.logprobs import entropy_of

from .peers import peer, without_accelerators
from .tables import (
    SEEDS,
    Tables,
    aggregated,
    assert_same,
    assert_same_loss,
    make_tables,
    value_and_gradient,
)

with without_accelerators():
    loss = peer("openrlhf.models.loss")
    from openrlhf.models import utils
    from openrlhf.trainer.ppo_utils import (
        AdaptiveKLController,
        apply_overlong_penalty,
        apply_stop_properly_penalty,
    )
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker


def policy_loss(
    t: Tables, logp: Tensor, advantage: Tensor, sampler: Tensor | None = None, **settings: Any
) -> Tensor:
    """OpenRLHF's policy loss, aggregated by OpenRLHF."""
    return loss.PolicyLoss(**settings)(logp, t.old_logp, advantage, t.counted, sampler)[0]


def kl_estimate(logp: Tensor, ref: Tensor, name: str, **more: Any) -> Tensor:
    """OpenRLHF's estimator. It works in float32."""
    return utils.compute_approx_kl(logp, ref, kl_estimator=name, **more).double()


# Losses and aggregations


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_surrogate(seed: int, dual: float | None, tokens: bool, extreme: bool) -> None:
    t = make_tables(seed, holes=True, extreme=extreme)
    settings = {
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.28,
        "dual_clip": dual,
        "token_level_loss": tokens,
    }
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_surrogate(
                logp, t.old_logp, t.token_advantages, 0.2, 0.28, dual_clip=dual
            ).loss,
            t,
            "token" if tokens else "sequence",
        ),
        lambda logp: policy_loss(t, logp, t.token_advantages, **settings),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.sequence_surrogate(
                logp, t.old_logp, t.advantages, t.mask, 0.04, 0.05
            ).loss,
            t,
            "sequence",
        ),
        lambda logp: policy_loss(
            t, logp, t.advantages, clip_eps_low=0.04, clip_eps_high=0.05, policy_loss_type="gspo"
        ),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_a_correction_is_clipped_against_the_sampler(seed: int) -> None:
    # OpenRLHF then takes the sequence ratio to the sampler instead of the proximal policy, and
    # applies no weight. Ours keeps the two apart.
    t = make_tables(seed)
    settings = {
        "clip_eps_low": 0.04,
        "clip_eps_high": 0.05,
        "policy_loss_type": "gspo",
        "is_correction_level": "token",
    }
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.sequence_surrogate(
                logp, t.sampler_logp, t.advantages, t.mask, 0.04, 0.05
            ).loss,
            t,
            "sequence",
        ),
        lambda logp: policy_loss(t, logp, t.advantages, t.sampler_logp, **settings),
        t.logp,
    )


def test_gspo_of_openrlhf_does_not_clamp_the_sequence_ratio() -> None:
    # Mean log-ratio 30 with A = -1: e^20 here, e^30 there.
    old, advantage, mask = torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    at = torch.full((1, 2), 30.0)
    ours = sequence_losses.sequence_surrogate(at, old, advantage, mask, 0.2, 0.2).loss[0, 0]
    theirs = loss.PolicyLoss(policy_loss_type="gspo")(at, old, advantage, mask.double())[0]
    assert_same(torch.stack([ours, theirs]).log(), torch.tensor([20.0, 30.0]))


@pytest.mark.parametrize("clip", [0.2, None])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int, clip: float | None) -> None:
    t = make_tables(seed, holes=True)
    ours_clip = float("inf") if clip is None else clip
    assert_same_loss(
        lambda values: aggregated(
            losses.clipped_value_loss(values, t.old_values, t.token_rewards, ours_clip), t, "token"
        ),
        lambda values: loss.ValueLoss(clip)(values, t.old_values, t.token_rewards, t.counted),
        t.values,
    )


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregation_with_a_row_that_has_no_token(seed: int, tokens: bool) -> None:
    t = make_tables(seed, holes=True)
    t.mask[1] = False
    assert_same_loss(
        lambda x: aggregated(x, t, "token" if tokens else "sequence"),
        lambda x: loss.aggregate_loss(x, t.counted, token_level_loss=tokens),
        t.values,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_of_logits(seed: int) -> None:
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(seed)) * 3
    assert_same_loss(
        lambda z: entropy_of(z.log_softmax(-1)).sum(),
        lambda z: utils.compute_entropy(z).sum(),
        logits,
    )


# Corrections, inside its policy loss


@pytest.mark.parametrize("seed", SEEDS)
def test_correction_weights(seed: int) -> None:
    # Weights multiply the token loss and leave the denominator alone.
    t = make_tables(seed)
    log_rho = t.old_logp - t.sampler_logp
    weights = {
        ("token", "clip", (0.0, 1.2)): off_policy.truncated_token(log_rho, t.mask, 1.2),
        ("token", "mask", (0.8, 1.2)): off_policy.masked_token(log_rho, t.mask, 0.8, 1.2),
        ("token", "mask", (0.0, 1.2)): off_policy.token_ratio(log_rho, t.mask, 1.2),
        ("seq", "mask", (0.9, 1.1)): off_policy.geometric_mask(log_rho, t.mask, 0.9, 1.1),
    }
    for (level, mode, band), weight in weights.items():
        settings = {
            "is_correction_level": level,
            "is_correction_mode": mode,
            "is_correction_threshold": band,
        }
        assert_same_loss(
            lambda logp, weight=weight: aggregated(
                weight
                * losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss,
                t,
                "token",
            ),
            lambda logp, settings=settings: policy_loss(
                t, logp, t.token_advantages, t.sampler_logp, **settings
            ),
            t.logp,
        )


def test_openrlhf_truncates_from_below_too() -> None:
    # Its clip holds rho in [low, high]; TIS here has no lower bound. rho = 0.1 in [0.5, 5]: weight
    # 0.5 there, 0.1 here.
    old, advantage, mask = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    sampler = old - torch.full((1, 1), 0.1).log()
    theirs = loss.PolicyLoss(is_correction_level="token", is_correction_mode="clip")(
        old, old, advantage, mask, sampler
    )[0]
    ours = off_policy.truncated_token(old - sampler, mask.bool(), 5.0)
    assert_same(torch.stack([ours.sum(), -theirs]), torch.tensor([0.1, 0.5]))


# KL


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(seed: int, name: str) -> None:
    # Log-ratios held within -2.2 and 4, where no estimator passes the +-10 at which OpenRLHF clamps
    # them: the next test.
    t = make_tables(seed)
    ref = t.logp - (t.logp - t.ref_logp).clamp(-2.2, 4.0)
    assert_same_loss(
        lambda logp: aggregated(kl.KL[name](logp, ref), t, "token"),
        lambda logp: loss.aggregate_loss(kl_estimate(logp, ref, name), t.counted),
        t.logp,
        rtol=2e-5,
    )


@pytest.mark.parametrize(
    ("name", "log_ratio", "value"),
    [("k1", -12.0, -12.0), ("k2", 6.0, 18.0), ("k3", -3.0, exp(3) - 4)],
)
def test_openrlhf_clamps_every_estimator_at_ten(name: str, log_ratio: float, value: float) -> None:
    # There the estimator is constant and gives no gradient; ours goes on.
    ref = torch.full((1, 1), -1.0)
    ours = value_and_gradient(lambda logp: kl.KL[name](logp, ref).sum(), ref + log_ratio)
    theirs = value_and_gradient(lambda logp: kl_estimate(logp, ref, name).sum(), ref + log_ratio)
    assert_same(ours[0], torch.tensor(value))
    assert float(theirs[0]) == (10.0 if value > 0 else -10.0)
    assert ours[1].abs().max() > 0
    assert theirs[1].abs().max() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_plus_is_the_unbiased_gradient_on_policy(seed: int) -> None:
    t = make_tables(seed)
    ref = t.logp - (t.logp - t.ref_logp).clamp(-2.2, 4.0)
    assert_same_loss(
        lambda logp: aggregated(kl.KL["k3+"](logp, ref), t, "token"),
        lambda logp: loss.aggregate_loss(
            kl_estimate(logp, ref, "k3", unbiased_gradient=True), t.counted
        ),
        t.logp,
        rtol=2e-5,
    )


def test_two_unbiased_kl_gradients_that_are_not_one() -> None:
    # Ratio w = 2, log-ratio r to the reference 1. OpenRLHF: value k3, gradient w r = 2. Ours
    # (DeepSeek-V3.2, as TRL): value w k3, gradient w (k3 + 1 - e^-r) = w r too. At w = 20
    # OpenRLHF's weight stays at 10.
    ref = torch.zeros(1, 1)
    at = ref + 1.0
    for w, capped in ((2.0, 2.0), (20.0, 10.0)):
        old = at - torch.tensor(w).log()
        ours = value_and_gradient(lambda logp, old=old: kl.unbiased(logp, old, ref).sum(), at)
        theirs = value_and_gradient(
            lambda logp, old=old: kl_estimate(
                logp, ref, "k3", log_probs_old=old, unbiased_gradient=True
            ).sum(),
            at,
        )
        assert_same(torch.stack([ours[0], ours[1].sum()]), torch.tensor([w * exp(-1), w]))
        assert_same(
            torch.stack([theirs[0], theirs[1].sum()]), torch.tensor([exp(-1), capped]), rtol=1e-5
        )


@pytest.mark.parametrize("measured", [0.01, 0.09, 0.1, 0.115, 5.0])
def test_adaptive_beta(measured: float) -> None:
    ours, theirs = (
        kl.AdaptiveBeta(0.05, target=0.1, horizon=1000),
        AdaptiveKLController(0.05, 0.1, 1000),
    )
    for n in (64, 64, 1000):
        ours.update(measured, n)
        theirs.update(measured, n)
        assert ours.beta == pytest.approx(theirs.value, rel=1e-12)


# Advantages and returns, from its experience maker


def experience_maker(
    t: Tables,
    estimator: str,
    rewards: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> SimpleNamespace:
    """One experience of all rows, after OpenRLHF has computed its advantages and returns."""
    arguments = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=t.samples),
        reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False
            )
        ),
    )
    stub = SimpleNamespace(
        strategy=SimpleNamespace(args=arguments),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=beta),
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(stub, name, getattr(RemoteExperienceMaker, name).__get__(stub))
    experience = SimpleNamespace(
        rewards=(t.rewards if rewards is None else rewards).clone(),
        index=list(range(len(t.mask))),
        info={},
        kl=kl.k1(t.old_logp, t.ref_logp),
        action_mask=t.mask.long(),
        values=t.values,
    )
    return RemoteExperienceMaker.compute_advantages_and_returns(stub, [experience])[0]


def rows(table: Tensor, t: Tables) -> Tensor:
    """[B] the value that a table has on all scored tokens of a row, which is checked."""
    first = table[:, 0]
    assert_same(torch.where(t.mask, first[:, None], 0.0), torch.where(t.mask, table, 0.0))
    return first


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed: int) -> None:
    # The z-score: n - 1, s = sqrt(K / (K - 1)) times our deviation, with eps 1e-9, which is worth
    # 1e-9 / s of ours.
    t = make_tables(seed)
    s = sqrt(t.samples / (t.samples - 1))
    assert_same(
        advantages.leave_one_out(t.rewards, t.group),
        rows(experience_maker(t, "rloo").advantages, t),
    )
    assert_same(
        advantages.group_mean(t.rewards, t.group),
        rows(experience_maker(t, "dr_grpo").advantages, t),
    )
    assert_same(
        advantages.group_zscore(t.rewards, t.group, eps=1e-9 / s),
        s * rows(experience_maker(t, "group_norm").advantages, t),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_with_and_without_a_group_baseline(seed: int) -> None:
    # Whitening is over tokens, population variance, on both sides. OpenRLHF also fills the padding,
    # and takes floats of 32 bits.
    t = make_tables(seed)
    kept = torch.where(t.mask, advantages.group_mean(t.rewards, t.group)[:, None], 0.0)
    theirs = experience_maker(t, "reinforce_baseline").advantages
    assert_same(
        returns.whiten(kept, t.mask), torch.where(t.mask, theirs, 0.0), rtol=1e-4, atol=1e-6
    )
    theirs = experience_maker(t, "reinforce", gamma=0.95).advantages
    ours = returns.whiten(returns.rewards_to_go(token_rewards(t, 0.0), t.mask, 0.95), t.mask)
    assert_same(ours, torch.where(t.mask, theirs, 0.0), rtol=1e-4, atol=1e-6)


def token_rewards(t: Tables, beta: float) -> Tensor:
    """Our token rewards: the row's reward on its last token, less beta k1 on every token."""
    last = t.lengths[:, None] - 1
    outcome = torch.zeros_like(t.values).scatter(1, last, t.rewards[:, None])
    return outcome - beta * kl.k1(t.old_logp, t.ref_logp)


@pytest.mark.parametrize("seed", SEEDS)
def test_returns_with_the_kl_in_the_reward(seed: int) -> None:
    t = make_tables(seed)
    ours = returns.rewards_to_go(token_rewards(t, 0.05), t.mask, 0.95)
    assert_same(
        ours,
        torch.where(t.mask, experience_maker(t, "reinforce", beta=0.05, gamma=0.95).returns, 0.0),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gae(seed: int) -> None:
    t = make_tables(seed)
    ours, our_returns = returns.gae(token_rewards(t, 0.05), t.values, t.mask, 0.97, 0.9)
    theirs = experience_maker(t, "gae", beta=0.05, gamma=0.97, lam=0.9)
    assert_same(our_returns, torch.where(t.mask, theirs.returns, 0.0))
    assert_same(
        returns.whiten(ours, t.mask),
        torch.where(t.mask, theirs.advantages, 0.0),
        rtol=1e-4,
        atol=1e-6,
    )


def test_openrlhf_zeroes_a_tools_tokens_where_ours_skips_them() -> None:
    # One tool token between two sampled ones, reward 1 at the end, V = 0, gamma 0.5: the first
    # token is one step from the reward here, two there.
    mask, rewards, values = (
        torch.tensor([[True, False, True]]),
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.zeros(1, 3),
    )
    stub = SimpleNamespace()
    for name, ours in (
        ("get_advantages_and_returns", returns.gae(rewards, values, mask, 0.5, 1.0)[0]),
        ("get_cumulative_returns", returns.rewards_to_go(rewards, mask, 0.5)),
    ):
        call = getattr(RemoteExperienceMaker, name)
        theirs = (
            call(stub, values, rewards, mask, 0.5, 1.0)[0]
            if name == "get_advantages_and_returns"
            else call(stub, rewards, mask, 0.5)
        )
        assert_same(ours, torch.tensor([[0.5, 0.0, 1.0]]))
        assert_same(theirs, torch.tensor([[0.25, 0.5, 1.0]]))


def test_openrlhf_whitens_with_a_floor_under_the_variance() -> None:
    # Variance 1e-10: ours divides by sqrt(1e-10 + 1e-8), OpenRLHF by sqrt(max(1e-10, 1e-8)). From
    # 1e-5 on they are one.
    mask = torch.ones(1, 2, dtype=torch.bool)
    for deviation in (1e-5, 0.1):
        table = torch.tensor([[-deviation, deviation]])
        ours, theirs = returns.whiten(table, mask), utils.masked_normalize(table, mask)
        assert_same(ours * sqrt(deviation**2 + 1e-8), theirs * sqrt(max(deviation**2, 1e-8)))


# Shaping


def experiences(rewards: Tensor, lengths: Tensor, truncated: Tensor) -> list[SimpleNamespace]:
    """OpenRLHF's batch, as its penalties read it; they change `rewards` in place."""
    return [SimpleNamespace(rewards=rewards.clone(), response_length=lengths, truncated=truncated)]


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_overlong_penalty(penalty: float) -> None:
    lengths = torch.arange(1, 20)
    batch = experiences(torch.zeros(19), lengths, torch.zeros(19))
    apply_overlong_penalty(
        batch, max_new_tokens=15, overlong_buffer_len=6, overlong_penalty_factor=penalty
    )
    assert_same(shaping.overlong_penalty(lengths, 15, 6, penalty), batch[0].rewards)


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0, -0.5])
def test_stop_properly(coefficient: float) -> None:
    t = make_tables(0)
    truncated = t.lengths % 2 == 0
    assert truncated.any()
    batch = experiences(t.rewards, t.lengths, truncated)
    apply_stop_properly_penalty(batch, coefficient)
    assert_same(shaping.stop_properly(t.rewards, truncated, coefficient), batch[0].rewards)
