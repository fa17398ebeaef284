"""Advantages: golden values, and what must hold for any rewards."""

from __future__ import annotations

import pytest
import torch
from golden import close, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.advantages import degenerate, group_mean, group_statistics, group_zscore

torch.set_num_threads(1)
NAN = float("nan")

rewards_and_groups = st.lists(st.tuples(st.floats(-8, 8, width=16), st.integers(0, 3)), min_size=1, max_size=16).map(
    lambda rows: (torch.tensor([r for r, _ in rows], dtype=torch.float64), torch.tensor([g for _, g in rows]))
)


def test_golden_zscore_with_population_std() -> None:
    rewards, group = table("adv_grpo_outcome", "rewards"), table("adv_grpo_outcome", "group").long()
    close(group_zscore(rewards, group), table("adv_grpo_outcome", "ddof0_eps1e6", "expected"))
    assert (group_zscore(rewards, group)[8:] == 0).all()


def test_group_mean_by_hand() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    close(group_mean(rewards, group), torch.tensor([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0]))


@settings(max_examples=80, deadline=None)
@given(rewards_and_groups)
def test_statistics_are_those_of_each_group_alone(case: tuple[Tensor, Tensor]) -> None:
    rewards, group = case
    mean, std, count = group_statistics(rewards, group)
    for i, g in enumerate(group.tolist()):
        mine = rewards[group == g]
        torch.testing.assert_close(mean[i], mine.mean())
        torch.testing.assert_close(std[i], mine.std(correction=0), atol=1e-9, rtol=1e-9)
        assert int(count[i]) == len(mine)


@settings(max_examples=80, deadline=None)
@given(rewards_and_groups, st.sampled_from([0.25, 1.0, 8.0]), st.sampled_from([-4.0, 0.0, 16.0]))
def test_zscore_does_not_see_scale_or_shift(case: tuple[Tensor, Tensor], scale: float, shift: float) -> None:
    """R' = a R + b with a > 0 gives the same advantages, but for eps."""
    rewards, group = case
    _, std, _ = group_statistics(rewards, group)
    moved = group_zscore(rewards * scale + shift, group)
    wide = std > 0.01  # eps is 1e-6, so this far the two agree to 1e-3
    torch.testing.assert_close(moved[wide], group_zscore(rewards, group)[wide], atol=2e-3, rtol=1e-3)


@settings(max_examples=80, deadline=None)
@given(rewards_and_groups, st.randoms(use_true_random=False))
@pytest.mark.parametrize("advantage", [group_mean, group_zscore])
def test_row_order_does_not_matter(advantage: object, case: tuple[Tensor, Tensor], rng: object) -> None:
    rewards, group = case
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(len(rewards)))
    a = advantage(rewards, group)[order]  # type: ignore[operator]
    b = advantage(rewards[order], group[order])  # type: ignore[operator]
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@settings(max_examples=80, deadline=None)
@given(rewards_and_groups)
@pytest.mark.parametrize("advantage", [group_mean, group_zscore])
def test_advantages_of_a_group_sum_to_zero(advantage: object, case: tuple[Tensor, Tensor]) -> None:
    rewards, group = case
    a = advantage(rewards, group)  # type: ignore[operator]
    for g in group.unique():
        assert abs(float(a[group == g].sum())) < 1e-6


@pytest.mark.parametrize("value", [0.1, 1.0 / 3.0, -7.7, 1e6])
@pytest.mark.parametrize("advantage", [group_mean, group_zscore])
def test_equal_rewards_give_exactly_zero(advantage: object, value: float) -> None:
    """In float32 the mean of equal numbers is not always that number: r - mean over a tiny std would be a large advantage made of rounding."""
    for k in (1, 3, 7, 10):
        rewards, group = torch.full((k,), value), torch.zeros(k, dtype=torch.int64)
        assert (advantage(rewards, group) == 0).all()  # type: ignore[operator]
        assert degenerate(rewards, group).all()


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("advantage", [group_mean, group_zscore])
def test_a_failed_check_changes_nothing_for_the_others(advantage: object, bad: float) -> None:
    with_bad, group = torch.tensor([1.0, bad, 0.0, 0.0, 3.0, bad, 5.0]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    keep = with_bad.isfinite()
    a = advantage(with_bad, group)  # type: ignore[operator]
    assert (a[~keep] == 0).all()
    torch.testing.assert_close(a[keep], advantage(with_bad[keep], group[keep]))  # type: ignore[operator]


def test_a_group_of_which_all_or_all_but_one_failed_is_degenerate() -> None:
    rewards, group = torch.tensor([NAN, NAN, NAN, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert degenerate(rewards, group).tolist() == [True, True, True, True, False, False]
    assert group_zscore(rewards, group)[:4].tolist() == [0.0] * 4


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_zscore(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
