"""Our losses against those of TRL's trainers: their methods, called unbound on a stub that holds
the settings and hands back our log-probs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.algorithm import distillation, entropy, kl, losses, off_policy, sequence_losses

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

grpo = peer("trl.trainer.grpo_trainer")
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

from .trl_stub import inputs, trainer  # noqa: E402

GRPO = grpo.GRPOTrainer


def trl_loss(
    t: Tables, logp: Tensor, advantage: Tensor, given: dict[str, Any] | None = None, **settings: Any
) -> Tensor:
    """GRPOTrainer's loss."""
    return GRPO._compute_loss(
        trainer(t, logp, **settings), None, inputs(t, advantage, **(given or {}))
    )


def row(t: Tables) -> Tensor:
    """[B] the advantage of each row of `t.advantages`."""
    return t.token_advantages[:, 0]


# Losses and aggregations


@pytest.mark.parametrize(
    ("loss_type", "how"),
    [
        ("grpo", "sequence"),
        ("bnpo", "token"),
        ("dapo", "token"),
        ("dr_grpo", "constant"),
        ("luspo", "sequence-sum"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_surrogate(seed: int, loss_type: str, how: str) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.28).loss, t, how
        ),
        lambda logp: trl_loss(t, logp, t.token_advantages, loss_type=loss_type, epsilon_high=0.28),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_two_sided_clip(seed: int) -> None:
    t = make_tables(seed)
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_surrogate(
                logp, t.old_logp, t.token_advantages, 0.2, 0.2, dual_clip=2.0
            ).loss,
            t,
            "token",
        ),
        lambda logp: trl_loss(t, logp, t.token_advantages, loss_type="dapo", delta=2.0),
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
        lambda logp: trl_loss(
            t,
            logp,
            row(t),
            importance_sampling_level="sequence",
            epsilon_low=0.04,
            epsilon_high=0.05,
        ),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_length_scaled_gspo(seed: int) -> None:
    t = make_tables(seed, holes=True)
    settings = {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.04,
        "epsilon_high": 0.05,
    }
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.length_scaled_sequence_surrogate(
                logp, t.old_logp, t.advantages, t.mask, 0.04, 0.05
            ).loss,
            t,
            "sequence",
        ),
        lambda logp: trl_loss(t, logp, row(t), **settings),
        t.logp,
    )


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
        lambda logp: GMPOTrainer._compute_loss(
            trainer(t, logp, epsilon_low=0.3, epsilon_high=0.4), None, inputs(t, row(t))
        ),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_soft_gate(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            losses.soft_gate(logp, t.old_logp, t.token_advantages, 1.0, 1.05).loss, t, "sequence"
        ),
        lambda logp: trl_loss(t, logp, t.token_advantages, loss_type="sapo"),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_of_trl_caps_at_epsilon_and_ours_at_one_plus(seed: int) -> None:
    t = make_tables(seed)
    assert_same_loss(
        lambda logp: aggregated(
            losses.clipped_weight(logp, t.old_logp, t.token_advantages, None, 0.28).loss, t, "token"
        ),
        lambda logp: trl_loss(t, logp, t.token_advantages, loss_type="cispo", epsilon_high=1.28),
        t.logp,
    )


def test_cispo_of_trl_with_the_clip_of_ppo_shrinks_every_gradient() -> None:
    # Its epsilon_high of 0.28 on an on-policy token (ratio 1): weight 0.28. Ours: 1, capped at
    # 1.28.
    t = make_tables(0)
    ours = value_and_gradient(
        lambda logp: aggregated(
            losses.clipped_weight(logp, t.logp, t.token_advantages, None, 0.28).loss, t, "token"
        ),
        t.logp,
    )
    theirs = value_and_gradient(
        lambda logp: trl_loss(
            t,
            logp,
            t.token_advantages,
            {"old_per_token_logps": t.logp},
            loss_type="cispo",
            epsilon_high=0.28,
        ),
        t.logp,
    )
    assert_same(ours[1] * 0.28, theirs[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_power_weight(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same_loss(
        lambda logp: aggregated(
            sequence_losses.power_weight(
                logp, t.old_logp, t.advantages, t.mask, 2.0, 3.0, 3.0, 2.0
            ).loss,
            t,
            "token",
        ),
        lambda logp: trl_loss(t, logp, t.advantages[:, :1], loss_type="vespo"),
        t.logp,
    )


def test_trl_holds_the_sequence_weight_of_vespo_above_1e_8() -> None:
    # log W of -19.5: W is e^-19.5 here and 1e-8 in TRL. The weight is e^lam W^k up to a factor of
    # e^(-lam W).
    t = make_tables(0)
    logp = torch.where(t.mask, t.old_logp - 19.5 / t.lengths[:, None], t.old_logp)
    ones = torch.ones(len(t.mask))
    ours = value_and_gradient(
        lambda at: sequence_losses.power_weight(
            at, t.old_logp, ones[:, None].expand_as(at), t.mask, 2.0, 3.0, 3.0, 2.0
        ).loss.sum(),
        logp,
    )[1]
    theirs = GRPO.get_gamma_weights(ones[:, None], logp - t.old_logp, t.counted, None)
    assert_same(-ours[t.mask] / exp(3 - 2 * 19.5), torch.ones_like(ours[t.mask]), rtol=1e-4)
    assert_same(theirs / (exp(3) * 1e-16), torch.ones_like(theirs), rtol=1e-4)


def test_trl_does_not_clamp_the_ratio() -> None:
    # Log-ratio 30 with A = -1: e^20 here and no gradient; e^30 in TRL.
    t = make_tables(0)
    far = t.old_logp + 30.0
    ours = value_and_gradient(
        lambda logp: aggregated(
            losses.clipped_surrogate(logp, t.old_logp, -torch.ones_like(logp), 0.2, 0.2).loss,
            t,
            "token",
        ),
        far,
    )
    theirs = value_and_gradient(
        lambda logp: trl_loss(t, logp, -torch.ones_like(logp), loss_type="dapo"), far
    )
    assert_same(torch.stack([ours[0], theirs[0]]).log(), torch.tensor([20.0, 30.0]))
    assert ours[1].abs().max() == 0
    assert_same(theirs[1].sum().log(), torch.tensor(30.0))


def test_a_row_without_a_token_counts_in_trls_mean_over_rows() -> None:
    # One of 8 rows is masked out whole: ours divides by 7, TRL's grpo and dr_grpo by 8.
    t = make_tables(0)
    t.mask[1] = False
    for loss_type, how in (("grpo", "sequence"), ("dr_grpo", "constant")):
        ours = aggregated(
            losses.clipped_surrogate(t.logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss, t, how
        )
        assert_same(ours * 7, trl_loss(t, t.logp, t.token_advantages, loss_type=loss_type) * 8)


def test_bnpo_is_a_mean_over_the_micro_batch_it_sees() -> None:
    # Two micro-batches of 1 and 7 rows, averaged: not the mean over the step's tokens. TRL's dapo
    # is told the step's number of them.
    t = make_tables(0)
    whole = aggregated(
        losses.clipped_surrogate(t.logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss, t, "token"
    )

    def part(rows: slice, loss_type: str) -> Tensor:
        given = {
            k: v[rows] if isinstance(v, Tensor) and v.ndim else v
            for k, v in inputs(t, t.token_advantages).items()
        }
        return GRPO._compute_loss(trainer(t, t.logp[rows], loss_type=loss_type), None, given)

    first, rest = slice(0, 1), slice(1, None)
    assert_same(part(first, "dapo") + part(rest, "dapo"), whole)
    counts = t.lengths[:1].sum(), t.lengths[1:].sum()
    assert_same(
        (part(first, "bnpo") * counts[0] + part(rest, "bnpo") * counts[1]) / t.mask.sum(), whole
    )
    assert not torch.isclose((part(first, "bnpo") + part(rest, "bnpo")) / 2, whole, rtol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_of_trl_clips_the_product_of_the_ratios(seed: int) -> None:
    # PPO's loss on one number a row, prod_t r_t, where GSPO's is its |o|-th root. It is our token
    # loss on a table of rows.
    t = make_tables(seed)

    def summed(table: Tensor) -> Tensor:
        return torch.where(t.mask, table, 0.0).sum(-1, keepdim=True)

    given = {"advantages": row(t), "old_logps": summed(t.old_logp)[:, 0]}
    assert_same_loss(
        lambda logp: losses.clipped_surrogate(
            summed(logp), summed(t.old_logp), t.token_advantages[:, :1], 0.2, 0.2
        ).loss.mean(),
        lambda logp: RLOOTrainer._compute_loss(trainer(t, logp), None, inputs(t, row(t), **given)),
        t.logp,
    )


# KL, entropy, off-policy terms of the loss


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_the_loss(seed: int, corrected: bool) -> None:
    # Plain k3, or k3 times the differentiable ratio; aggregated like the policy term.
    t = make_tables(seed)

    def ours(logp: Tensor) -> Tensor:
        term = kl.unbiased(logp, t.old_logp, t.ref_logp) if corrected else kl.k3(logp, t.ref_logp)
        return aggregated(
            losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss
            + 0.04 * term,
            t,
            "sequence",
        )

    assert_same_loss(
        ours,
        lambda logp: trl_loss(
            t, logp, t.token_advantages, beta=0.04, use_bias_correction_kl=corrected
        ),
        t.logp,
    )


def test_trl_multiplies_the_kl_of_gspo_by_the_sequence_ratio() -> None:
    # With importance sampling by sequence its correction is k3 times the row's ratio; `unbiased` is
    # k3 times the token's.
    t = make_tables(0)
    settings = {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    theirs = trl_loss(t, t.logp, row(t), beta=0.04, **settings) - trl_loss(
        t, t.logp, row(t), **settings
    )
    ratio = sequence_losses.sequence_surrogate(
        t.logp, t.old_logp, t.advantages, t.mask, 0.2, 0.2
    ).ratio
    assert_same(aggregated(0.04 * ratio * kl.k3(t.logp, t.ref_logp), t, "sequence"), theirs)
    assert not torch.isclose(
        aggregated(0.04 * kl.unbiased(t.logp, t.old_logp, t.ref_logp), t, "sequence"),
        theirs,
        rtol=1e-3,
    )


def test_trl_corrects_the_bias_of_the_kl_by_default() -> None:
    fields = {f.name: f.default for f in grpo.GRPOConfig.__dataclass_fields__.values()}
    assert fields["use_bias_correction_kl"] is True


@pytest.mark.parametrize("seed", SEEDS)
def test_top_entropy_tokens(seed: int) -> None:
    t = make_tables(seed)
    uncertain = t.values.abs()

    def ours(logp: Tensor) -> Tensor:
        keep = entropy.top_entropy_tokens(uncertain, t.mask, 0.8)
        return aggregated(
            keep * losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss,
            t,
            "token",
        )

    theirs = partial(
        trl_loss,
        t,
        advantage=t.token_advantages,
        entropies=uncertain,
        top_entropy_quantile=0.2,
        loss_type="dapo",
    )
    # TRL finds the quantile in float32: the entropy at the threshold itself must not fall between
    # the two.
    assert_same_loss(ours, lambda logp: theirs(logp=logp), t.logp)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_weight_multiplies_the_policy_term_and_not_the_kl(seed: int) -> None:
    # As in verl and here: the correction is of the policy loss; dropped tokens stay in the
    # denominator.
    t = make_tables(seed)
    weights = off_policy.masked_token(t.old_logp - t.sampler_logp, t.mask, 0.9, 1.1)

    def ours(logp: Tensor) -> Tensor:
        policy = losses.clipped_surrogate(logp, t.old_logp, t.token_advantages, 0.2, 0.2).loss
        return aggregated(weights * policy + 0.04 * kl.k3(logp, t.ref_logp), t, "token")

    settings = {
        "loss_type": "dapo",
        "beta": 0.04,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
    }
    assert_same_loss(
        ours,
        lambda logp: trl_loss(
            t, logp, t.token_advantages, {"importance_sampling_ratio": weights}, **settings
        ),
        t.logp,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_negative_sequence_mask(seed: int) -> None:
    # TRL measures the gap from the sampler where it knows it.
    t = make_tables(seed, holes=True)
    for delta in (-0.05, 0.0, 0.1):
        ours = off_policy.negative_sequence_mask(
            t.logp, t.sampler_logp, t.advantages, t.mask, delta
        )
        theirs = GRPO.get_off_policy_mask(
            t.advantages[:, :1], t.logp, t.sampler_logp, t.counted, delta
        )
        assert torch.equal(ours, theirs[:, 0].bool())
    keep = off_policy.negative_sequence_mask(t.logp, t.old_logp, t.advantages, t.mask, 0.0)
    assert_same_loss(
        lambda logp: aggregated(
            keep[:, None] * losses.clipped_surrogate(logp, t.old_logp, t.advantages, 0.2, 0.2).loss,
            t,
            "sequence",
        ),
        lambda logp: trl_loss(t, logp, row(t), off_policy_mask_threshold=0.0),
        t.logp,
    )


@pytest.mark.parametrize(
    "measured", [[0.1, 0.1, 0.3, 0.1], [0.5, 0.1, 0.1, 0.5], [0.2, 0.2, 0.2, 0.2]]
)
def test_adaptive_entropy_of_trl_applies_what_the_step_before_decided(
    measured: list[float],
) -> None:
    # The same coefficients after every step. But TRL decides with the entropy of the step before
    # whether the bonus acts at all.
    t = make_tables(0)
    ours = entropy.AdaptiveEntropy(0.01, target=0.2, delta=0.004, highest=0.015)
    settings = {
        "entropy_target": 0.2,
        "entropy_coef_delta": 0.004,
        "entropy_coef_max": 0.015,
        "entropy_coef_min": 0.0,
    }
    stub = trainer(
        t,
        t.logp,
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        **settings,
    )
    stub._last_world_entropy, stub._entropy_window_stats = float("inf"), None
    stub.model.training = True
    plain = trl_loss(t, t.logp, t.token_advantages)
    for h, before in zip(measured, [float("inf"), *measured], strict=False):
        stub._get_per_token_logps_and_entropies = lambda *a, h=h, **k: (
            t.logp,
            torch.full_like(t.logp, h),
            None,
        )
        theirs = GRPO._compute_loss(stub, None, inputs(t, t.token_advantages))
        assert_same(plain - theirs, torch.tensor(ours.applied(before) * h))
        ours.update(h)
        assert stub.entropy_coef == pytest.approx(ours.coefficient)


# Distillation


@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_distillation_is_trls_without_its_weights(seed: int) -> None:
    # IW-OPD at gamma 0: -A log pi, A = teacher - sampler at the sampled token, averaged over
    # tokens.
    t = make_tables(seed)
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(*t.mask.shape, 7, generator=g)
    ids = torch.randint(0, 7, t.mask.shape, generator=g)
    stub = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    labels = torch.where(t.mask, ids, -100)

    def ours(z: Tensor) -> Tensor:
        logp = z.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        advantage = distillation.per_token_advantage(t.sampler_logp, t.ref_logp, t.mask)
        return aggregated(losses.policy_gradient(logp, advantage), t, "token")

    assert_same_loss(
        ours,
        lambda z: IWOPDTrainer._compute_iw_opd_loss(
            stub, z, ids, labels, t.ref_logp, t.sampler_logp
        ),
        logits,
    )
