"""Our advantages, returns and reward shaping against verl's own, called."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from sixfold.algorithm import advantages, returns, shaping

from .peers import peer
from .tables import SEEDS, Tables, assert_same, binary_rewards, make_tables

core = peer("verl.trainer.ppo.core_algos")
from verl.utils import torch_functional as functional  # noqa: E402
from verl.workers.reward_manager.dapo import DAPORewardManager  # noqa: E402


def outcome(t: Tables, rewards: Tensor) -> Tensor:
    """[B, T] verl's token rewards of an outcome reward: on the last scored token."""
    last = (t.mask * torch.arange(1, t.mask.shape[1] + 1)).argmax(-1)
    return torch.zeros_like(t.logp).scatter(1, last[:, None], rewards[:, None])


def verl_advantage(name: str, t: Tables, rewards: Tensor, **more: Any) -> Tensor:
    """[B] verl's advantage of each row: the same on all its scored tokens, and 0 elsewhere, which
    is checked.
    """
    table, _ = core.get_adv_estimator_fn(name)(
        token_level_rewards=outcome(t, rewards), response_mask=t.counted, index=t.index, **more
    )
    row = table.sum(-1) / t.lengths
    assert_same(torch.where(t.mask, row[:, None], 0.0), table)
    return row


# Advantages


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("estimator", "tolerance"), [("grpo", 1e-6), ("grpo_vectorized", 1e-3)])
def test_zscore_is_verls_times_the_ratio_of_the_two_deviations(
    seed: int, estimator: str, tolerance: float
) -> None:
    # verl divides by the n - 1 deviation, s = sqrt(K / (K - 1)) times ours; its eps of 1e-6 is then
    # worth eps / s of ours. Its vectorised form works in float32.
    t = make_tables(seed)
    s = sqrt(t.samples / (t.samples - 1))
    ours = advantages.group_zscore(t.rewards, t.group, eps=1e-6 / s)
    assert_same(ours, s * verl_advantage(estimator, t, t.rewards), rtol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
def test_group_mean_is_verls_grpo_without_the_deviation(seed: int, estimator: str) -> None:
    t = make_tables(seed)
    theirs = verl_advantage(estimator, t, t.rewards, norm_adv_by_std_in_grpo=False)
    assert_same(advantages.group_mean(t.rewards, t.group), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
def test_leave_one_out(seed: int, estimator: str) -> None:
    t = make_tables(seed)
    assert_same(
        advantages.leave_one_out(t.rewards, t.group), verl_advantage(estimator, t, t.rewards)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_length_weighted_baseline(seed: int) -> None:
    t = make_tables(seed, holes=True)
    assert_same(
        advantages.length_weighted(t.rewards, t.group, t.lengths),
        verl_advantage("opo", t, t.rewards),
    )


@pytest.mark.parametrize(
    "estimator",
    [
        "grpo",
        "grpo_vectorized",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
    ],
)
def test_a_group_of_one_gets_its_raw_reward_from_verl_and_nothing_from_us(estimator: str) -> None:
    # verl gives it mean 0 and std 1; its vectorised leave-one-out alone gives 0. A baseline made of
    # the row alone leaves nothing: 0 here, or ValueError where the formula divides by K - 1.
    rewards, mask = torch.tensor([0.5, 2.0]), torch.ones(2, 1)
    given = {
        "token_level_rewards": rewards[:, None].clone(),
        "response_mask": mask,
        "index": np.array(["a", "b"], dtype=object),
    }
    theirs = core.get_adv_estimator_fn(estimator)(**given)[0][:, 0]
    special = {
        "reinforce_plus_plus_baseline": (rewards - 1.25) / rewards.std(),
        "rloo_vectorized": torch.zeros(2),
    }
    assert_same(theirs, special.get(estimator, rewards), rtol=1e-5)
    assert (advantages.group_zscore(rewards, torch.tensor([0, 1]), 1e-6) == 0).all()
    with pytest.raises(ValueError, match="at least 2 samples"):
        advantages.leave_one_out(rewards, torch.tensor([0, 1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_differs_in_its_factor_alone(seed: int) -> None:
    # Ours B / (rows of groups that are not degenerate), as the paper; verl's B / (rows with a
    # reward other than 0).
    t = make_tables(seed)
    rewards = binary_rewards(t, seed)
    rows = len(rewards)
    useful = rows - t.samples
    ours = advantages.gpg(rewards, t.group)
    theirs = verl_advantage("gpg", t, rewards)
    assert_same(ours * max(useful, 1), theirs * int((rewards != 0).sum()))
    if useful:
        assert ours.abs().max() > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_top_gap_is_verls_without_its_division_by_the_deviation(seed: int) -> None:
    t = make_tables(seed)
    ours = advantages.top_gap(t.rewards, t.group)
    assert_same(
        ours, verl_advantage("grpo_passk", t, t.rewards, config={"norm_adv_by_std_in_grpo": False})
    )
    std = t.rewards.view(-1, t.samples).std(-1).repeat_interleave(t.samples)
    assert_same(ours / (std + 1e-6), verl_advantage("grpo_passk", t, t.rewards, config={}))


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_baseline(seed: int) -> None:
    # One reward a row, on its last token: verl's reward to go is then the row's reward everywhere.
    t = make_tables(seed)
    greedy = t.token_rewards[:, 0]
    theirs, _ = core.compute_remax_outcome_advantage(outcome(t, t.rewards), greedy, t.counted)
    assert_same(
        torch.where(t.mask, advantages.greedy_baseline(t.rewards, greedy)[:, None], 0.0), theirs
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalises_rows_here_and_tokens_in_verl(seed: int) -> None:
    # verl's second normalisation is over tokens, so that long rows weigh more, n - 1. With rows of
    # one length only the two n - 1 remain.
    t = make_tables(seed)
    parts = torch.stack([t.rewards, t.token_rewards[:, 0], t.values[:, 0]], -1)
    weights = torch.tensor([1.0, 0.5, 2.0])
    rows, width = t.mask.shape
    everything = torch.ones(rows, width)
    config = {"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": weights.tolist()}
    theirs, _ = core.compute_gdpo_outcome_advantage(
        token_level_rewards=everything,
        response_mask=everything,
        index=t.index,
        config=config,
        non_tensor_batch={key: parts[:, i].numpy() for i, key in enumerate("abc")},
        batch={
            "prompts": torch.zeros(rows, 1),
            "attention_mask": torch.ones(rows, width + 1, dtype=torch.long),
        },
    )
    ours = advantages.normalise_then_sum(parts, weights, t.group, 1e-6)
    assert_same(ours * sqrt((rows * width - 1) / (rows * width)), theirs[:, 0], rtol=1e-3)


# Returns


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_its_returns(seed: int, holes: bool) -> None:
    t = make_tables(seed, holes=holes)
    ours, our_returns = returns.gae(t.token_rewards, t.values, t.mask, 0.97, 0.9)
    theirs, their_returns = core.compute_gae_advantage_return(
        t.token_rewards, t.values, t.counted, 0.97, 0.9
    )
    # verl carries its sums under the mask, where ours is 0; and whitens inside, with n - 1.
    n = int(t.mask.sum())
    assert_same(our_returns, torch.where(t.mask, their_returns, 0.0))
    assert_same(returns.whiten(ours, t.mask) * sqrt((n - 1) / n), torch.where(t.mask, theirs, 0.0))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus(seed: int, holes: bool) -> None:
    t = make_tables(seed, holes=holes)
    ours = returns.rewards_to_go(t.token_rewards, t.mask, 0.95)
    theirs, their_returns = core.compute_reinforce_plus_plus_outcome_advantage(
        t.token_rewards, t.counted, SimpleNamespace(gamma=0.95)
    )
    n = int(t.mask.sum())
    assert_same(ours, their_returns)
    assert_same(returns.whiten(ours, t.mask) * sqrt((n - 1) / n), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_with_a_group_baseline(seed: int) -> None:
    t = make_tables(seed)
    n = int(t.mask.sum())
    table = torch.where(t.mask, advantages.group_mean(t.rewards, t.group)[:, None], 0.0)
    theirs, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        outcome(t, t.rewards), t.counted, t.index
    )
    assert_same(returns.whiten(table, t.mask) * sqrt((n - 1) / n), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening_differs_by_n_minus_one(seed: int) -> None:
    t = make_tables(seed)
    n = int(t.mask.sum())
    theirs = torch.where(t.mask, functional.masked_whiten(t.values, t.counted), 0.0)
    assert_same(returns.whiten(t.values, t.mask) * sqrt((n - 1) / n), theirs)


# Shaping


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_overlong_penalty(penalty: float) -> None:
    # Lengths up to the longest allowed; there the two end. Beyond it ours stays at -penalty and
    # verl's line goes on down.
    longest, buffer = 12, 5
    theirs = verl_overlong(list(range(1, 16)), longest, buffer, penalty)
    ours = shaping.overlong_penalty(torch.arange(1, 16), longest, buffer, penalty)
    assert_same(ours[:12], theirs[:12])
    assert_same(theirs[12:], -penalty * torch.tensor([6.0, 7.0, 8.0]) / buffer)
    assert (ours[12:] == -penalty).all()


def verl_overlong(lengths: list[int], longest: int, buffer: int, penalty: float) -> Tensor:
    """The reward that verl's DAPO reward manager gives to answers of these lengths whose score is
    0.
    """
    manager = SimpleNamespace(
        _extract_reward_from_rm_scores=lambda data, return_dict: None,
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "", eos_token="<eos>"),
        reward_fn_key="source",
        compute_score=lambda **given: 0.0,
        overlong_buffer_cfg=SimpleNamespace(
            enable=True, len=buffer, penalty_factor=penalty, log=False
        ),
        max_resp_len=longest,
        num_examine=0,
    )
    width = max(lengths)
    rows = [
        SimpleNamespace(
            batch={
                "prompts": torch.zeros(1),
                "responses": torch.zeros(width),
                "attention_mask": torch.cat([torch.ones(1 + n), torch.zeros(width - n)]).long(),
            },
            non_tensor_batch={"reward_model": {"ground_truth": ""}, "source": "here"},
        )
        for n in lengths
    ]

    class Data(list[SimpleNamespace]):
        batch: ClassVar = {"responses": torch.zeros(len(lengths), width)}

    return DAPORewardManager.__call__(manager, Data(rows)).sum(-1).double()
