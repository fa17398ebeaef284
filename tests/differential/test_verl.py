"""Our losses, KL estimators, aggregations and corrections against verl's own, called: values and
gradients.
"""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.algorithm import entropy, kl, losses, off_policy, sequence_losses
from sixfold.trainer.logprobs import entropy_of

from .peers import peer
from .tables import (
    SEEDS,
    Tables,
    aggregated,
    assert_same,
    assert_same_loss,
    make_tables,
    value_and_gradient,
)

core = peer("verl.trainer.ppo.core_algos")
from verl.trainer.ppo import rollout_corr_helper as correction  # noqa: E402
from verl.utils import torch_functional as functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

# verl's names of the aggregations; and a dual clip so far out that it is off.
AGGREGATION = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "sequence-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
NO_DUAL_CLIP = 1e12
FAR = 1e9


def actor(
    low: float = 0.2,
    high: float = 0.2,
    dual: float = NO_DUAL_CLIP,
    policy_loss: dict[str, Any] | None = None,
    **more: Any,
) -> ActorConfig:
    """verl's config of a policy loss."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **more,
    )


def verl_loss(
    name: str,
    t: Tables,
    logp: Tensor,
    advantage: Tensor,
    config: ActorConfig,
    how: str = "token",
    weights: Tensor | None = None,
) -> Tensor:
    """One of verl's registered policy losses, aggregated by verl."""
    loss = core.get_policy_loss_fn(name)
    return loss(t.old_logp, logp, advantage, t.counted, AGGREGATION[how], config, weights)[0]


# KL


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+"])
def test_kl_estimators(seed: int, name: str) -> None:
    # Log-ratios held above -2.2, where k3 is below the 10 at which verl clamps it: the next test.
    t = make_tables(seed)
    ref = t.logp - (t.logp - t.ref_logp).clamp_min(-2.2)
    assert_same_loss(
        lambda logp: aggregated(kl.KL[name](logp, ref), t, "token"),
        lambda logp: core.agg_loss(core.kl_penalty(logp, ref, name), t.counted, "token-mean"),
        t.logp,
    )


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_verl_clamps_the_value_of_k3_at_ten(name: str) -> None:
    # log-ratio -3: k3 is e^3 - 4 = 16.1. verl says 10 and gives k3 no gradient there; "k3+" keeps
    # that of k2 on both sides.
    ref = torch.full((1, 1), -1.0)
    ours, our_gradient = value_and_gradient(lambda logp: kl.KL[name](logp, ref).sum(), ref - 3)
    theirs, their_gradient = value_and_gradient(
        lambda logp: core.kl_penalty(logp, ref, name).sum(), ref - 3
    )
    assert_same(ours, torch.tensor(exp(3) - 4))
    assert theirs == 10
    expected = (1 - exp(3), 0.0) if name == "k3" else (-3.0, -3.0)
    assert_same(torch.stack([our_gradient[0, 0], their_gradient[0, 0]]), torch.tensor(expected))


@pytest.mark.parametrize("measured", [0.01, 0.09, 0.1, 0.115, 5.0])
def test_adaptive_beta(measured: float) -> None:
    ours, theirs = (
        kl.AdaptiveBeta(0.05, target=0.1, horizon=1000),
        core.AdaptiveKLController(0.05, 0.1, 1000),
    )
    for n in (64, 64, 1000):
        ours.update(measured, n)
        theirs.update(measured, n)
        assert ours.beta == pytest.approx(theirs.value, rel=1e-12)


def test_adaptive_beta_counts_at_most_one_horizon_a_step() -> None:
    # A step of ten horizons (n counted in tokens): verl's factor is 1 - 0.2 * 10 = -1 and turns the
    # penalty into a reward. Ours is 1 - 0.2.
    ours, theirs = (
        kl.AdaptiveBeta(0.05, target=0.1, horizon=1000),
        core.AdaptiveKLController(0.05, 0.1, 1000),
    )
    ours.update(0.0, 10_000)
    theirs.update(0.0, 10_000)
    assert (ours.beta, theirs.value) == (pytest.approx(0.04), pytest.approx(-0.05))


def test_kl_in_the_reward_is_k1() -> None:
    t = make_tables(0)
    assert_same(
        t.token_rewards - 0.3 * kl.k1(t.old_logp, t.ref_logp),
        core.compute_rewards(t.token_rewards, t.old_logp, t.ref_logp, 0.3),
    )


# Losses


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("how", list(AGGREGATION))
@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_surrogate(seed: int, how: str, extreme: bool) -> None:
    t = make_tables(seed, holes=True, extreme=extreme)
    width = t.mask.shape[1]
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.28).loss,
            t,
            how,
            width,
        ),
        lambda logp: verl_loss("vanilla", t, logp, t.token_advantages, actor(0.2, 0.28), how),
        t.logp,
    )


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip(seed: int, extreme: bool) -> None:
    t = make_tables(seed, extreme=extreme)
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_surrogate(
                logp, t.old_logp, t.token_advantages, 0.2, 0.2, dual_clip=3.0
            ).loss,
            t,
            "token",
        ),
        lambda logp: verl_loss("vanilla", t, logp, t.token_advantages, actor(dual=3.0)),
        t.logp,
    )


def test_verl_clips_dually_unless_told_otherwise() -> None:
    # Its default caps the loss of a negative token at 3 |A|; ours is off. Ratio 5, A = -1: 5 here,
    # 3 there, and there without a gradient.
    old, advantage, mask = torch.zeros(1, 1), torch.full((1, 1), -1.0), torch.ones(1, 1)
    default = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    ours = value_and_gradient(
        lambda logp: losses.clipped_surrogate(logp, old, advantage, 0.2, 0.2).loss.sum(),
        torch.full((1, 1), 5.0).log(),
    )
    theirs = value_and_gradient(
        lambda logp: core.compute_policy_loss_vanilla(old, logp, advantage, mask, config=default)[
            0
        ],
        torch.full((1, 1), 5.0).log(),
    )
    assert_same(torch.stack([ours[0], ours[1].sum()]), torch.tensor([5.0, 5.0]))
    assert_same(torch.stack([theirs[0], theirs[1].sum()]), torch.tensor([3.0, 0.0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_fractions(seed: int) -> None:
    # verl's two shares together are our `active`, which counts what the clip took from the
    # gradient.
    t = make_tables(seed)
    surrogate = losses.clipped_surrogate(
        t.logp, t.old_logp, t.token_advantages, 0.2, 0.2, dual_clip=3.0
    )
    _, metrics = core.compute_policy_loss_vanilla(
        t.old_logp, t.logp, t.token_advantages, t.counted, config=actor(dual=3.0)
    )
    share = surrogate.active[t.mask].double().mean()
    assert float(share) == pytest.approx(
        metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"], abs=1e-6
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(seed: int) -> None:
    # With one advantage a row, verl's token form, our sequence form and our token form are one:
    # values and gradients.
    t = make_tables(seed, holes=True)
    for form in (sequence_losses.sequence_surrogate, sequence_losses.sequence_token_surrogate):
        assert_same_loss(
            lambda logp, form=form: aggregated(
                form(logp, t.old_logp, t.advantages, t.mask, 0.04, 0.05).loss, t, "sequence"
            ),
            lambda logp: verl_loss("gspo", t, logp, t.advantages, actor(0.04, 0.05), "sequence"),
            t.logp,
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_token_advantages(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.sequence_token_surrogate(
                logp, t.old_logp, t.token_advantages, t.mask, 0.04, 0.05
            ).loss,
            t,
            "sequence",
        ),
        lambda logp: verl_loss("gspo", t, logp, t.token_advantages, actor(0.04, 0.05), "sequence"),
        t.logp,
    )


def test_verl_clamps_the_log_of_a_sequence_ratio_at_ten() -> None:
    # Mean log-ratio 12, A = -1: the ratio is e^12 here, with its gradient; e^10 in verl, without
    # one.
    old, advantage, mask = torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    ours = value_and_gradient(
        lambda logp: sequence_losses.sequence_surrogate(logp, old, advantage, mask, 0.2, 0.2).loss[
            0, 0
        ],
        torch.full((1, 2), 12.0),
    )
    theirs = value_and_gradient(
        lambda logp: core.compute_policy_loss_gspo(
            old, logp, advantage, mask.double(), config=actor()
        )[0],
        torch.full((1, 2), 12.0),
    )
    assert_same(ours[0] / exp(12), torch.tensor(1.0))
    assert_same(theirs[0] / exp(10), torch.tensor(1.0))
    assert ours[1].abs().max() > 0
    assert theirs[1].abs().max() == 0


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_soft_gate(seed: int, extreme: bool) -> None:
    t = make_tables(seed, holes=True, extreme=extreme)
    assert_same_loss(
        lambda logp: aggregated(
            losses.soft_gate(logp, t.old_logp, t.token_advantages, 1.0, 1.05).loss, t, "sequence"
        ),
        lambda logp: verl_loss(
            "sapo", t, logp, t.token_advantages, actor(tau_pos=1.0, tau_neg=1.05), "sequence"
        ),
        t.logp,
    )


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_caps_at_one_plus_epsilon_as_verl_does(seed: int, extreme: bool) -> None:
    t = make_tables(seed, extreme=extreme)
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_weight(logp, t.old_logp, t.token_advantages, 0.9, 0.28).loss, t, "token"
        ),
        lambda logp: verl_loss("cispo", t, logp, t.token_advantages, actor(0.9, 0.28)),
        t.logp,
    )


def test_cispo_has_a_lower_bound_in_verl_by_default() -> None:
    # verl's default low of 0.2 holds the weight at 0.8 from below. Without a bound, as the paper
    # has it, the weight is the ratio: 0.5.
    old, advantage, mask = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    at = torch.full((1, 1), 0.5).log()
    _, ours = value_and_gradient(
        lambda logp: losses.clipped_weight(logp, old, advantage, None, 0.2).loss.sum(), at
    )
    _, theirs = value_and_gradient(
        lambda logp: core.compute_policy_loss_cispo(old, logp, advantage, mask, config=actor())[0],
        at,
    )
    assert_same(torch.stack([ours, theirs]).flatten(), torch.tensor([-0.5, -0.8]))


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.geometric_surrogate(
                logp, t.old_logp, t.advantages, t.mask, 0.3, 0.4
            ).loss,
            t,
            "sequence",
        ),
        lambda logp: verl_loss("geo_mean", t, logp, t.advantages, actor(0.3, 0.4)),
        t.logp,
    )


def test_gmpo_of_verl_averages_over_the_micro_batch_it_sees() -> None:
    # Told the batch's true size, verl's PPO loss of micro-batches of 1 and 7 rows adds up to that
    # of all 8. Its GMPO ignores it; our weights do not.
    t = make_tables(0)
    ours = aggregated(
        sequence_losses.geometric_surrogate(
            t.logp, t.old_logp, t.advantages, t.mask, 0.4, 0.4
        ).loss,
        t,
        "sequence",
    )
    config = actor(0.4, 0.4, global_batch_info={"global_batch_size": len(t.mask)})

    def split(name: str) -> Tensor:
        given = (t.old_logp, t.logp, t.advantages, t.counted)
        loss = core.get_policy_loss_fn(name)
        return sum(
            loss(*(x[rows] for x in given), "seq-mean-token-mean", config)[0]
            for rows in (slice(0, 1), slice(1, None))
        )

    means = [
        core.compute_policy_loss_geo_mean(
            t.old_logp[r], t.logp[r], t.advantages[r], t.counted[r], config=config
        )[0]
        for r in (slice(0, 1), slice(1, None))
    ]
    assert_same(
        split("vanilla"),
        core.compute_policy_loss_vanilla(
            t.old_logp, t.logp, t.advantages, t.counted, "seq-mean-token-mean", config
        )[0],
    )
    assert_same(split("geo_mean"), means[0] + means[1])
    assert_same(ours, (means[0] + 7 * means[1]) / 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_policy_gradient_is_verls_gpg_loss(seed: int) -> None:
    t = make_tables(seed)
    assert_same_loss(
        lambda logp: aggregated(
            losses.policy_gradient(logp, t.token_advantages), t, "sequence-sum"
        ),
        lambda logp: verl_loss("gpg", t, logp, t.token_advantages, actor(), "sequence-sum"),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov(seed: int) -> None:
    # The share is set so high that every candidate is taken: which of them go is a coin on both
    # sides.
    t = make_tables(seed)

    def ours(logp: Tensor) -> Tensor:
        surrogate = losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2)
        tokens = (
            entropy.clip_cov_tokens(t.token_advantages, logp.detach(), t.mask, 1.0, 0.1, 1.5, seed)
            & ~surrogate.active
        )
        assert tokens.any()
        return aggregated(torch.where(tokens, 0.0, surrogate.loss), t, "token")

    config = actor(policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5})
    assert_same_loss(
        ours, lambda logp: verl_loss("clip_cov", t, logp, t.token_advantages, config), t.logp
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov(seed: int) -> None:
    t = make_tables(seed)
    inf = float("inf")

    def ours(logp: Tensor) -> Tensor:
        surrogate = losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, inf, inf)
        tokens = entropy.kl_cov_tokens(t.token_advantages, logp.detach(), t.mask, 0.2)
        return aggregated(
            surrogate.loss + torch.where(tokens, 0.7 * (logp - t.old_logp).abs(), 0.0), t, "token"
        )

    config = actor(policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7})
    assert_same_loss(
        ours, lambda logp: verl_loss("kl_cov", t, logp, t.token_advantages, config), t.logp
    )


def test_verls_covariance_rules_take_at_least_one_token() -> None:
    # A share of 1e-6 of a few dozen tokens: none here. verl still drops one gradient, and still
    # penalises one token.
    t = make_tables(0)
    assert not entropy.kl_cov_tokens(t.token_advantages, t.logp, t.mask, 1e-6).any()
    assert not entropy.clip_cov_tokens(t.token_advantages, t.logp, t.mask, 1e-6, 0.1, 9.0, 0).any()
    plain = losses.clipped_surrogate(
        t.logp, t.old_logp, t.token_advantages, float("inf"), float("inf")
    ).loss
    worst = torch.where(
        t.mask, entropy.covariance(t.token_advantages, t.logp, t.mask), -torch.inf
    ).argmax()
    penalty = (t.logp - t.old_logp).abs().flatten()[worst]
    theirs = verl_loss(
        "kl_cov",
        t,
        t.logp,
        t.token_advantages,
        actor(policy_loss={"kl_cov_ratio": 1e-6, "ppo_kl_coef": 1.0}),
    )
    assert_same(theirs, aggregated(plain, t, "token") + penalty / t.mask.sum())
    config = actor(policy_loss={"clip_cov_ratio": 1e-6, "clip_cov_lb": 0.1, "clip_cov_ub": 9.0})
    _, metrics = core.get_policy_loss_fn("clip_cov")(
        t.old_logp, t.logp, t.token_advantages, t.counted, "token-mean", config
    )
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / int(t.mask.sum()))


def test_verls_covariance_losses_do_not_clamp_the_ratio() -> None:
    # Log-ratio 30, A = -1: e^20 here, as in verl's own PPO loss; e^30 in its two covariance losses.
    old, advantage, mask, at = (
        torch.zeros(1, 1),
        -torch.ones(1, 1),
        torch.ones(1, 1),
        torch.full((1, 1), 30.0),
    )
    ours = losses.clipped_surrogate(at, old, advantage, 0.2, 0.2).loss.sum()
    theirs = [
        core.get_policy_loss_fn(name)(old, at, advantage, mask, "token-mean", actor())[0]
        for name in ("vanilla", "clip_cov", "kl_cov")
    ]
    logs = torch.stack([ours, *theirs]).log()
    assert_same(logs, torch.tensor([20.0, 20.0, 30.0, 30.0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda values: aggregated(
            losses.clipped_value_loss(values, t.old_values, t.token_rewards, 0.5), t, "token"
        ),
        lambda values: core.compute_value_loss(
            values, t.token_rewards, t.old_values, t.counted, 0.5
        )[0],
        t.values,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_of_logits(seed: int) -> None:
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(seed)) * 3
    assert_same_loss(
        lambda z: entropy_of(z.log_softmax(-1)).sum(),
        lambda z: functional.entropy_from_logits(z).sum(),
        logits,
    )


# Aggregation


@pytest.mark.parametrize("how", list(AGGREGATION))
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregation_with_a_row_that_has_no_token(seed: int, how: str) -> None:
    t = make_tables(seed, holes=True)
    t.mask[1] = False
    assert_same_loss(
        lambda x: aggregated(x, t, how, horizon=31),
        lambda x: core.agg_loss(x, t.counted, AGGREGATION[how], loss_scale_factor=31),
        t.values,
    )


def test_verls_constant_is_the_padded_width_unless_told() -> None:
    # Two more columns of padding: our loss is the same, verl's shrinks by width / (width + 2).
    t = make_tables(0)
    width = t.mask.shape[1]
    wider = [torch.nn.functional.pad(x, (0, 2)) for x in (t.values, t.counted)]
    narrow, wide = (
        core.agg_loss(t.values, t.counted, AGGREGATION["constant"]),
        core.agg_loss(*wider, AGGREGATION["constant"]),
    )
    assert_same(wide, narrow * width / (width + 2))
    assert_same(narrow, aggregated(t.values, t, "constant", horizon=width))


# Off-policy corrections


def corrected(t: Tables, level: str, bounds: float | str) -> Tensor:
    """verl's correction weights; 1 where nothing was sampled, where verl has 0."""
    weights, _ = correction.compute_rollout_correction_weights(
        t.old_logp - t.sampler_logp, t.counted, level, bounds
    )
    return torch.where(t.mask, weights, 1.0)


def kept(t: Tables, rule: str, low: float, high: float) -> Tensor:
    """verl's rejection mask."""
    mask, _ = correction.compute_rollout_rejection_mask(
        t.old_logp - t.sampler_logp, t.counted, rule, f"{low}_{high}"
    )
    return mask.bool()


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_correction_weights(seed: int, holes: bool) -> None:
    t = make_tables(seed, holes=holes)
    log_rho = t.old_logp - t.sampler_logp
    assert_same(off_policy.truncated_token(log_rho, t.mask, 1.5), corrected(t, "token", 1.5))
    assert_same(off_policy.truncated_sequence(log_rho, t.mask, 1.5), corrected(t, "sequence", 1.5))
    assert_same(
        off_policy.masked_token(log_rho, t.mask, 0.5, 1.5), corrected(t, "token", "0.5_1.5")
    )
    assert_same(
        off_policy.masked_sequence(log_rho, t.mask, 0.5, 1.5), corrected(t, "sequence", "0.5_1.5")
    )
    assert_same(off_policy.token_ratio(log_rho, t.mask, 1.5), corrected(t, "token", "1e-12_1.5"))
    assert_same(off_policy.token_ratio(log_rho, t.mask), corrected(t, "token", FAR))


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_rejection_bounds_are_on_the_inverse_ratio(seed: int) -> None:
    # Its k1 is -log(trainer / sampler): to keep what is in our [low, high] it must be told [1 /
    # high, 1 / low].
    t = make_tables(seed)
    low, high = 0.8, 1.6
    log_rho = t.old_logp - t.sampler_logp
    ours = {
        "token_k1": off_policy.masked_token(log_rho, t.mask, low, high),
        "seq_sum_k1": off_policy.masked_sequence(log_rho, t.mask, low, high),
        "seq_mean_k1": off_policy.geometric_mask(log_rho, t.mask, low, high),
    }
    for rule, weights in ours.items():
        assert torch.equal((weights > 0) & t.mask, kept(t, rule, 1 / high, 1 / low))


def test_verl_told_our_bounds_keeps_another_set() -> None:
    # Ratio 1.5 in [0.8, 1.6]: kept here. Its inverse, 0.67, is outside: verl drops it.
    log_rho, mask = torch.full((1, 1), 1.5).log(), torch.ones(1, 1, dtype=torch.bool)
    theirs, _ = correction.compute_rollout_rejection_mask(
        log_rho, mask.double(), "token_k1", "0.8_1.6"
    )
    assert off_policy.masked_token(log_rho, mask, 0.8, 1.6) > 0
    assert theirs == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_geometric_mask_keeps_raw_ratios(seed: int) -> None:
    t = make_tables(seed)
    ours = off_policy.geometric_mask(t.old_logp - t.sampler_logp, t.mask, 0.9, 1.1)
    theirs = corrected(t, "token", FAR) * kept(t, "seq_mean_k1", 1 / 1.1, 1 / 0.9)
    assert_same(torch.where(t.mask, ours, 0.0), theirs)


@pytest.mark.parametrize("name", ["vanilla", "cispo", "sapo", "gpg"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_weight_multiplies_the_token_loss_and_stays_in_the_denominator(
    seed: int, name: str
) -> None:
    # Decoupled PPO: the ratio is against the proximal policy, the weight against the sampler. A
    # weight of 0 still counts as a token.
    t = make_tables(seed)
    weights = off_policy.masked_token(t.old_logp - t.sampler_logp, t.mask, 0.9, 1.1)
    tables = {
        "vanilla": (
            lambda logp: (
                losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss
            )
        ),
        "cispo": (
            lambda logp: losses.clipped_weight(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss
        ),
        "sapo": lambda logp: losses.soft_gate(logp, t.old_logp, t.token_advantages, 1.0, 1.05).loss,
        "gpg": lambda logp: losses.policy_gradient(logp, t.token_advantages),
    }
    how = "sequence" if name == "sapo" else "token"
    assert ((weights == 0) & t.mask).any()
    assert_same_loss(
        lambda logp: aggregated(weights * tables[name](logp), t, how),
        lambda logp: verl_loss(name, t, logp, t.token_advantages, actor(), how, weights),
        t.logp,
    )


def test_rejection_through_the_mask_does_not_count_in_the_denominator() -> None:
    # verl's rejection sampling edits the mask: the same survivors, divided by their own number and
    # not by the step's.
    t = make_tables(0)
    weights = off_policy.masked_token(t.old_logp - t.sampler_logp, t.mask, 0.9, 1.1)
    survivors = kept(t, "token_k1", 1 / 1.1, 1 / 0.9)
    ours = aggregated(weights * losses.policy_gradient(t.logp, t.token_advantages), t, "token")
    theirs = core.compute_policy_loss_gpg(
        t.old_logp,
        t.logp,
        t.token_advantages,
        survivors.double(),
        config=actor(),
        rollout_is_weights=weights,
    )[0]
    assert_same(ours * t.mask.sum(), theirs * survivors.sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_diagnostics(seed: int) -> None:
    # verl reports the effective sample size of the ratios after its cap: far out, the cap is off.
    t = make_tables(seed)
    raw = off_policy.token_ratio(t.old_logp - t.sampler_logp, t.mask)
    _, weighed = correction.compute_rollout_correction_weights(
        t.old_logp - t.sampler_logp, t.counted, "token", FAR
    )
    compared = correction.compute_offpolicy_metrics(t.old_logp, t.sampler_logp, t.counted)
    assert float(off_policy.effective_sample_size(raw, t.mask)) == pytest.approx(
        weighed["rollout_is_eff_sample_size"], rel=1e-6
    )
    assert float(off_policy.chi2(raw, t.mask)) == pytest.approx(
        compared["chi2_token"], rel=1e-6, abs=1e-7
    )
