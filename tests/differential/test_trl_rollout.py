"""Our advantages, corrections and reward shaping against TRL's: what its trainers make of a batch
of rollouts, called unbound on a stub.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.algorithm import advantages, kl, off_policy, shaping

from .peers import peer
from .tables import SEEDS, assert_same, make_tables

grpo = peer("trl.trainer.grpo_trainer")
from trl.rewards import accuracy_rewards, get_cosine_scaled_reward, get_soft_overlong_punishment  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

from .trl_stub import rollout  # noqa: E402

GRPO = grpo.GRPOTrainer


# Advantages


@pytest.mark.parametrize("seed", SEEDS)
def test_zscore_is_trls_times_the_ratio_of_the_two_deviations(seed: int) -> None:
    # TRL divides by the n - 1 deviation, s = sqrt(K / (K - 1)) times ours, and its eps is 1e-4:
    # worth 1e-4 / s of ours.
    t = make_tables(seed)
    s = sqrt(t.samples / (t.samples - 1))
    theirs = rollout(t, t.rewards[:, None])["advantages"]
    assert_same(advantages.group_zscore(t.rewards, t.group, eps=1e-4 / s), s * theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_mean(seed: int) -> None:
    t = make_tables(seed)
    assert_same(
        advantages.group_mean(t.rewards, t.group),
        rollout(t, t.rewards[:, None], scale_rewards="none")["advantages"],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_std(seed: int) -> None:
    # n - 1 over the batch, eps 1e-4.
    t = make_tables(seed)
    s = sqrt(len(t.rewards) / (len(t.rewards) - 1))
    theirs = rollout(t, t.rewards[:, None], scale_rewards="batch")["advantages"]
    assert_same(advantages.batch_std(t.rewards, t.group, eps=1e-4 / s), s * theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out(seed: int) -> None:
    t = make_tables(seed)
    assert_same(
        advantages.leave_one_out(t.rewards, t.group),
        rollout(t, t.rewards[:, None], RLOOTrainer)["advantages"],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_normalise_then_sum(seed: int) -> None:
    # Both of TRL's deviations are n - 1: s1 over the group, s2 over the batch. Rewards are large,
    # so that the first eps does not matter; the second meets a total that is s1 times smaller, and
    # is worth 1e-4 s1 / s2 of ours.
    t = make_tables(seed)
    parts = torch.stack([t.rewards, t.token_rewards[:, 0], t.values[:, 0]], -1) * 1e6
    weights = torch.tensor([1.0, 0.5, 2.0])
    theirs = rollout(
        t, parts, multi_objective_aggregation="normalize_then_sum", reward_weights=weights
    )["advantages"]
    s1, s2 = (sqrt(n / (n - 1)) for n in (t.samples, len(t.rewards)))
    assert_same(
        advantages.normalise_then_sum(parts, weights, t.group, eps=1e-4 * s1 / s2), s2 * theirs
    )


@pytest.mark.parametrize("kind", [GRPO, RLOOTrainer])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_row_without_a_reward_takes_no_part(seed: int, kind: Any) -> None:
    t = make_tables(seed)
    rewards = t.rewards.clone()
    rewards[1] = rewards[-1] = torch.nan
    theirs = rollout(t, rewards[:, None], kind, scale_rewards="none")["advantages"]
    ours = (
        advantages.group_mean(rewards, t.group)
        if kind is GRPO
        else advantages.leave_one_out(rewards, t.group)
    )
    assert ours[1] == ours[-1] == 0
    assert_same(ours, theirs)


def test_a_row_with_one_part_missing_trains_on_the_rest() -> None:
    # One of the first row's two parts is missing: the z-score of its other part is left, as here.
    t = make_tables(0)
    parts = torch.stack([t.rewards, t.token_rewards[:, 0]], -1)
    parts[0, 0] = torch.nan
    ours = advantages.normalise_then_sum(parts, torch.ones(2), t.group, 1e-6)
    theirs = rollout(t, parts, multi_objective_aggregation="normalize_then_sum")["advantages"]
    assert ours[0] != 0 and ours[0].sign() == theirs[0].sign()


def test_trl_scales_the_rounding_of_equal_rewards() -> None:
    # Groups of six equal rewards in float32, whose mean is not exactly their value. TRL divides
    # what is left by 1e-4; ours is exactly 0.
    t = make_tables(3)
    rewards = torch.full_like(t.rewards, 1000.1).float()
    assert (rewards - rewards.mean()).abs().max() > 0
    assert (advantages.group_zscore(rewards, t.group, 1e-6) == 0).all()
    assert (
        rollout(t, rewards[:, None], reward_weights=torch.ones(1).float())["advantages"].abs().max()
        > 0.1
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_kl_in_the_reward_of_rloo(seed: int) -> None:
    t = make_tables(seed)
    per_token = [(t.old_logp, None, None), (t.ref_logp, None, None)]
    settings = {
        "beta": 0.05,
        "ref_model": object(),
        "_get_per_token_logps_and_entropies": lambda *given, **more: per_token.pop(0),
    }
    rewards = t.rewards - 0.05 * torch.where(t.mask, kl.k1(t.old_logp, t.ref_logp), 0.0).sum(-1)
    assert_same(
        advantages.leave_one_out(rewards, t.group),
        rollout(t, t.rewards[:, None], RLOOTrainer, **settings)["advantages"],
    )


# Corrections


@pytest.mark.parametrize("seed", SEEDS)
def test_correction_weights(seed: int) -> None:
    t = make_tables(seed)
    log_rho = t.old_logp - t.sampler_logp

    def theirs(mode: str, low: float | None, high: float | None) -> Tensor:
        settings = {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": high,
        }
        ratio = rollout(t, t.rewards[:, None], **settings)["importance_sampling_ratio"]
        return torch.where(t.mask, ratio, 1.0)

    assert_same(
        off_policy.truncated_token(log_rho, t.mask, 1.2), theirs("token_truncate", None, 1.2)
    )
    assert_same(
        off_policy.truncated_sequence(log_rho, t.mask, 1.2), theirs("sequence_truncate", None, 1.2)
    )
    assert_same(off_policy.masked_token(log_rho, t.mask, 0.8, 1.2), theirs("token_mask", 0.8, 1.2))
    assert_same(
        off_policy.masked_sequence(log_rho, t.mask, 0.8, 1.2), theirs("sequence_mask", 0.8, 1.2)
    )
    assert_same(
        off_policy.masked_sequence(log_rho, t.mask, None, 3.0), theirs("sequence_mask", None, 3.0)
    )
    assert_same(off_policy.token_ratio(log_rho, t.mask), theirs("token_mask", None, None))


def test_trls_default_correction_is_the_sequence_mask_at_three() -> None:
    fields = {f.name: f.default for f in grpo.GRPOConfig.__dataclass_fields__.values()}
    assert fields["vllm_importance_sampling_mode"] == "sequence_mask"
    assert fields["vllm_importance_sampling_clip_max"] == 3.0
    assert fields["vllm_importance_sampling_clip_min"] is None


# Shaping


def test_overlong_penalty() -> None:
    lengths = list(range(1, 20))
    theirs = get_soft_overlong_punishment(max_completion_len=15, soft_punish_cache=6)(
        [[1] * n for n in lengths]
    )
    assert_same(shaping.overlong_penalty(torch.tensor(lengths), 15, 6), torch.tensor(theirs))


def test_cosine_length_reward_where_the_answer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    # From max_len on, TRL stays at the value of a long answer; ours pays `exceed`, as the paper.
    lengths = list(range(1, 20))
    correct = [n % 3 == 0 for n in lengths]
    monkeypatch.setattr(
        accuracy_rewards,
        "accuracy_reward",
        lambda completions, solution: [float(c) for c in correct],
    )
    theirs = torch.tensor(
        get_cosine_scaled_reward(max_len=15)(
            completions=[], solution=[], completion_ids=[[1] * n for n in lengths]
        )
    )
    ours = shaping.cosine_length_reward(
        torch.tensor(lengths), torch.tensor(correct), 15, 1.0, 0.5, -1.0, -0.5, exceed=-3.0
    )
    assert_same(ours[:14], theirs[:14])
    assert (ours[14:] == -3).all()
    assert_same(theirs[14:], torch.where(torch.tensor(correct), 0.5, -0.5)[14:])
