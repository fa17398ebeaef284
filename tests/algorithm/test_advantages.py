"""Advantages: golden values, and what must hold for any rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from golden import ALGORITHM_CASES as GOLDEN
from golden import close, table
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.advantages import (
    batch_std,
    degenerate,
    gpg,
    greedy_baseline,
    group_mean,
    group_statistics,
    group_zscore,
    leave_one_out,
    length_weighted,
    maxrl,
    normalise_then_sum,
    pass_at_k,
    top_gap,
)

torch.set_num_threads(1)
NAN = float("nan")
Advantage = Callable[[Tensor, Tensor], Tensor]


def weighted_by_place(rewards: Tensor, group: Tensor) -> Tensor:
    """`length_weighted` with a length for each row that the row itself decides, so that it can be
    reordered like the others.
    """
    return length_weighted(
        rewards, group, 1 + (torch.nan_to_num(rewards, 0.0, 0.0, 0.0) * 7).abs().round()
    )


def two_parts(rewards: Tensor, group: Tensor) -> Tensor:
    """`normalise_then_sum` of the reward and of its square."""
    return normalise_then_sum(
        torch.stack([rewards, rewards**2], -1), torch.tensor([1.0, 0.5]), group, 1e-6
    )


zscore: Advantage = partial(group_zscore, eps=1e-6)
batch_scaled: Advantage = partial(batch_std, eps=1e-6)

ALL: list[Advantage] = [
    group_mean,
    zscore,
    leave_one_out,
    batch_scaled,
    weighted_by_place,
    maxrl,
    gpg,
    top_gap,
    two_parts,
]
CENTRED: list[Advantage] = [group_mean, zscore, leave_one_out, batch_scaled, gpg, two_parts]

rewards_and_groups = st.lists(
    st.tuples(st.floats(-8, 8, width=16), st.integers(0, 3)), min_size=1, max_size=16
).map(
    lambda rows: (
        torch.tensor([r for r, _ in rows], dtype=torch.float64),
        torch.tensor([g for _, g in rows]),
    )
)


def samples_of_three_prompts(
    values: st.SearchStrategy[float],
) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Rewards and groups of three prompts with two to six samples each, interleaved."""
    answers = st.lists(values, min_size=2, max_size=6)
    return st.tuples(answers, answers, answers, st.integers(0, 99)).map(interleaved)


def interleaved(case: tuple[list[float], list[float], list[float], int]) -> tuple[Tensor, Tensor]:
    *answers, seed = case
    rewards = torch.tensor([r for prompt in answers for r in prompt], dtype=torch.float64)
    group = torch.tensor([g for g, prompt in enumerate(answers) for _ in prompt])
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    return rewards[order], group[order]


prompts = samples_of_three_prompts(st.integers(0, 32).map(lambda n: n / 8))
prompts_with_failures = samples_of_three_prompts(
    st.integers(0, 40).map(lambda n: n / 8 if n <= 32 else NAN)
)
binary_prompts = samples_of_three_prompts(st.sampled_from([0.0, 1.0, NAN]))


def golden(case: str, name: str, side: str = "inputs") -> Tensor:
    return torch.tensor(GOLDEN[case][side][name], dtype=torch.float64)


def golden_rows(case: str) -> tuple[Tensor, Tensor]:
    return golden(case, "rewards"), golden(case, "group").long()


def test_golden_zscore_with_population_std() -> None:
    rewards, group = table("adv_grpo_outcome", "rewards"), table("adv_grpo_outcome", "group").long()
    close(group_zscore(rewards, group, 1e-6), table("adv_grpo_outcome", "ddof0_eps1e6", "expected"))
    assert (group_zscore(rewards, group, 1e-6)[8:] == 0).all()


def test_group_mean_by_hand() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    close(group_mean(rewards, group), torch.tensor([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0]))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(rewards_and_groups)
def test_statistics_are_those_of_each_group_alone(case: tuple[Tensor, Tensor]) -> None:
    rewards, group = case
    mean, std, count = group_statistics(rewards, group)
    for i, g in enumerate(group.tolist()):
        mine = rewards[group == g]
        torch.testing.assert_close(mean[i], mine.mean())
        torch.testing.assert_close(std[i], mine.std(correction=0), atol=1e-9, rtol=1e-9)
        assert int(count[i]) == len(mine)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(rewards_and_groups, st.sampled_from([0.25, 1.0, 8.0]), st.sampled_from([-4.0, 0.0, 16.0]))
def test_zscore_does_not_see_scale_or_shift(
    case: tuple[Tensor, Tensor], scale: float, shift: float
) -> None:
    """R' = a R + b with a > 0 gives the same advantages, but for eps."""
    rewards, group = case
    _, std, _ = group_statistics(rewards, group)
    moved = group_zscore(rewards * scale + shift, group, 1e-6)
    wide = std > 0.01  # eps is 1e-6, so this far the two agree to 1e-3
    torch.testing.assert_close(
        moved[wide], group_zscore(rewards, group, 1e-6)[wide], atol=2e-3, rtol=1e-3
    )


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(prompts_with_failures, st.integers(0, 99))
@pytest.mark.parametrize("advantage", ALL)
def test_row_order_does_not_matter(
    advantage: Advantage, case: tuple[Tensor, Tensor], seed: int
) -> None:
    rewards, group = case
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        advantage(rewards, group)[order],
        advantage(rewards[order], group[order]),
        atol=1e-9,
        rtol=1e-9,
    )


@pytest.mark.mostly_slow(1)
@settings(max_examples=50, deadline=None)
@given(prompts_with_failures)
@pytest.mark.parametrize("advantage", CENTRED)
def test_advantages_of_a_group_sum_to_zero(
    advantage: Advantage, case: tuple[Tensor, Tensor]
) -> None:
    rewards, group = case
    a = advantage(rewards, group)
    for g in group.unique():
        assert abs(float(a[group == g].sum())) < 1e-6


@pytest.mark.parametrize("value", [0.1, 1.0 / 3.0, 7.7, 1e6])
@pytest.mark.parametrize("advantage", ALL)
def test_equal_rewards_give_exactly_zero(advantage: Advantage, value: float) -> None:
    """In float32 the mean of equal numbers is not always that number: r - mean over a tiny std
    would be a large advantage made of rounding.

    The second group is there so that the batch as a whole is not degenerate.
    """
    for k in (2, 3, 7, 10):
        rewards = torch.cat([torch.full((k,), value), torch.tensor([0.0, 1.0, 0.25])])
        group = torch.tensor([0] * k + [1] * 3)
        assert (advantage(rewards, group)[:k] == 0).all()
        assert degenerate(rewards, group).tolist() == [True] * k + [False] * 3


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("advantage", ALL)
def test_a_failed_check_changes_nothing_for_the_others(advantage: Advantage, bad: float) -> None:
    with_bad, group = (
        torch.tensor([1.0, bad, 0.0, 0.0, 3.0, bad, 5.0]),
        torch.tensor([0, 0, 0, 0, 1, 1, 1]),
    )
    keep = with_bad.isfinite()
    a = advantage(with_bad, group)
    assert (a[~keep] == 0).all() and (a[keep] != 0).any()
    torch.testing.assert_close(a[keep], advantage(with_bad[keep], group[keep]))


def test_a_group_of_which_all_or_all_but_one_failed_is_degenerate() -> None:
    rewards, group = torch.tensor([NAN, NAN, NAN, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert degenerate(rewards, group).tolist() == [True, True, True, True, False, False]
    assert group_zscore(rewards, group, 1e-6)[:4].tolist() == [0.0] * 4


@pytest.mark.parametrize("advantage", [*ALL, lambda r, g: pass_at_k(r, g, 1), greedy_baseline])
def test_shapes_are_checked(advantage: Advantage) -> None:
    for rewards, group in (((2, 3), (2,)), ((3,), (2,)), ((2, 3), (2, 3))):
        with pytest.raises(ValueError, match=r"\[B\]|\[B, R\]"):
            advantage(torch.zeros(rewards), torch.zeros(group, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[R\]"):
        normalise_then_sum(
            torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1e-6
        )


@pytest.mark.parametrize("advantage", ALL)
def test_float32_and_float64_agree_and_stay_what_they_are(advantage: Advantage) -> None:
    rewards, group = golden_rows("adv_grpo_outcome")
    single = advantage(rewards.float(), group)
    assert single.dtype == torch.float32 and advantage(rewards, group).dtype == torch.float64
    torch.testing.assert_close(single.double(), advantage(rewards, group), atol=2e-6, rtol=2e-6)


def test_golden_values() -> None:
    rewards, group = golden_rows("adv_rloo")
    close(group_mean(rewards, group), golden("adv_dr_grpo", "adv", "expected"))
    close(leave_one_out(rewards, group), golden("adv_rloo", "adv", "expected"))
    close(
        length_weighted(rewards, group, golden("adv_opo", "lengths")),
        golden("adv_opo", "adv", "expected"),
    )
    close(gpg(rewards, group), golden("adv_gpg", "adv_paper", "expected"))
    close(maxrl(*golden_rows("adv_maxrl")), golden("adv_maxrl", "adv", "expected"))
    close(
        greedy_baseline(golden("adv_remax", "reward"), golden("adv_remax", "greedy_reward")),
        golden("adv_remax", "adv", "expected"),
    )
    close(
        top_gap(golden("adv_passk_topgap", "rewards"), torch.zeros(4, dtype=torch.int64)),
        golden("adv_passk_topgap", "adv_no_std", "expected"),
    )


def population(n: int) -> float:
    """Population std over the n - 1 form. With eps times this as well, (r - mean) / (std + eps)
    becomes larger by exactly its inverse.
    """
    return math.sqrt((n - 1) / n)


def test_golden_batch_std_in_the_population_form() -> None:
    rewards, group = golden_rows("adv_batch_std_liteppo")
    factor = population(len(rewards))
    close(
        batch_std(rewards, group, eps=1e-4 * factor) * factor,
        golden("adv_batch_std_liteppo", "adv", "expected"),
    )


def test_golden_normalise_then_sum_in_the_population_form() -> None:
    parts, group, factor = (
        golden("adv_gdpo", "rewards"),
        torch.zeros(4, dtype=torch.int64),
        population(4),
    )
    ours = normalise_then_sum(parts, golden("adv_gdpo", "weights"), group, eps=1e-4 * factor)
    # The file's sums are ours times the factor, and their n - 1 std is our population std; only the
    # second eps is then left to account for.
    std = golden("adv_gdpo", "summed", "expected").std(correction=1)
    close(
        ours * factor * (std + 1e-4 * factor) / (std + 1e-4), golden("adv_gdpo", "adv", "expected")
    )


@pytest.mark.parametrize("i", range(3))
def test_golden_pass_at_k(i: int) -> None:
    n, c, k = GOLDEN["adv_passk_analytic"]["inputs"]["ncks"][i]
    expected = GOLDEN["adv_passk_analytic"]["expected"]["pos_neg"][i]
    rewards = torch.tensor([1.0] * c + [0.0] * (n - c), dtype=torch.float64)
    a = pass_at_k(rewards, torch.zeros(n, dtype=torch.int64), k)
    close(a, torch.tensor([expected[0]] * c + [expected[1]] * (n - c)))


@pytest.mark.parametrize("i", range(5))
def test_pass_at_k_holds_the_estimator(i: int) -> None:
    """A right row's advantage is sqrt((1 - p) / p), so p = 1 / (1 + A^2); where p is 0 or 1 there
    is nothing to learn.
    """
    n, c, k = GOLDEN["passk_estimator"]["inputs"]["ncks"][i]
    expected = GOLDEN["passk_estimator"]["expected"]["passk"][i]
    a = pass_at_k(
        torch.tensor([1.0] * c + [0.0] * (n - c), dtype=torch.float64),
        torch.zeros(n, dtype=torch.int64),
        k,
    )
    if expected in (0.0, 1.0):
        assert (a == 0).all()
    else:
        assert 1 / (1 + float(a[0]) ** 2) == pytest.approx(expected, abs=1e-6)


def slow_pass_at_k(rewards: list[float], k: int) -> list[float]:
    """Every draw of k, one by one: its reward is the best in it, and a row's advantage is the mean
    z-score of the draws that hold it.
    """
    draws = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in draw) for draw in draws]
    mean = sum(best) / len(best)
    std = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
    if std == 0:
        return [0.0] * len(rewards)
    mine = [
        [b for b, draw in zip(best, draws, strict=True) if i in draw] for i in range(len(rewards))
    ]
    return [(sum(m) / len(m) - mean) / std for m in mine]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(binary_prompts, st.integers(1, 4))
def test_pass_at_k_is_the_mean_over_all_draws(case: tuple[Tensor, Tensor], k: int) -> None:
    rewards, group = case
    assume(int(torch.bincount(group).min()) >= k)
    a = pass_at_k(rewards, group, k)
    assert (a[rewards.isnan()] == 0).all()
    for g in range(3):
        mine = (group == g) & rewards.isfinite()
        expected = (
            slow_pass_at_k(rewards[mine].tolist(), k)
            if int(mine.sum()) >= k
            else [0.0] * int(mine.sum())
        )
        close(a[mine], torch.tensor(expected))


def test_pass_at_1_is_the_zscore() -> None:
    rewards, group = (
        torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).double(),
        torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
    )
    torch.testing.assert_close(pass_at_k(rewards, group, 1), group_zscore(rewards, group, eps=0.0))


def test_pass_at_k_is_stable_for_many_samples() -> None:
    """Of 2,000 samples one is right: p = k / n exactly, by hand; factorials of this size
    overflow.
    """
    rewards = torch.zeros(2000, dtype=torch.float64)
    rewards[7] = 1.0
    a = pass_at_k(rewards, torch.zeros(2000, dtype=torch.int64), 500)
    assert float(a[7]) == pytest.approx(math.sqrt(3), rel=1e-9)
    assert float(a[0]) == pytest.approx(-math.sqrt(3) / 1999, rel=1e-9)


def test_pass_at_k_refuses_what_has_no_meaning() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k={k}"):
            pass_at_k(rewards, group, k)
    with pytest.raises(ValueError, match=r"0 .wrong. or 1 .right."):
        pass_at_k(torch.tensor([1.0, 0.5]), torch.tensor([0, 0]), 1)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(prompts)
def test_leave_one_out_is_k_over_k_minus_1_times_centred(case: tuple[Tensor, Tensor]) -> None:
    """And it is what its name says: the reward less the mean of the others."""
    rewards, group = case
    a = leave_one_out(rewards, group)
    _, _, k = group_statistics(rewards, group)
    torch.testing.assert_close(a, k / (k - 1) * group_mean(rewards, group))
    for i in range(len(rewards)):
        others = (group == group[i]) & (torch.arange(len(rewards)) != i)
        torch.testing.assert_close(a[i], rewards[i] - rewards[others].mean(), atol=1e-9, rtol=0)


def test_leave_one_out_needs_others() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    one_left = leave_one_out(torch.tensor([1.0, NAN, NAN, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]))
    assert one_left.tolist() == [0.0, 0.0, 0.0, 1.0, -1.0]


@settings(max_examples=50, deadline=None)
def _two_parts(r: Tensor, g: Tensor) -> Tensor:
    """`normalise_then_sum` of the rewards and a second part."""
    parts = torch.stack([r, torch.arange(len(r)) % 3], -1)
    return normalise_then_sum(parts, torch.tensor([1.0, 0.5]), g, eps=0.0)


@pytest.mark.slow
@given(prompts_with_failures, st.sampled_from([0.25, 2.0, 8.0]), st.sampled_from([0.0, 0.5, 16.0]))
@pytest.mark.parametrize(("advantage", "grows", "shifts"), [
    (group_mean, True, True),
    (leave_one_out, True, True),
    (gpg, True, True),
    (top_gap, True, True),
    (lambda r, g: length_weighted(r, g, 1 + torch.arange(len(r))), True, True),
    (lambda r, g: group_zscore(r, g, eps=0.0), False, True),
    (lambda r, g: batch_std(r, g, eps=0.0), False, True),
    (_two_parts, False, True),
    (maxrl, False, False),
])  # fmt: skip
def test_scale_and_shift(
    advantage: Advantage,
    grows: bool,
    shifts: bool,
    case: tuple[Tensor, Tensor],
    scale: float,
    shift: float,
) -> None:
    """a r + b gives a A where nothing is divided by, A where a deviation is; a shift changes only
    maxrl, which divides by the mean.
    """
    rewards, group = case
    moved = advantage(scale * rewards + (shift if shifts else 0.0), group)
    torch.testing.assert_close(
        moved, advantage(rewards, group) * (scale if grows else 1.0), atol=1e-9, rtol=1e-7
    )


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(prompts_with_failures)
def test_gpg_keeps_the_size_of_the_gradient(case: tuple[Tensor, Tensor]) -> None:
    """The mean over all known rows of |A| is the mean of |r - mean| over the rows that teach
    something.
    """
    rewards, group = case
    useful = rewards.isfinite() & ~degenerate(rewards, group)
    assume(useful.any())
    known = int(rewards.isfinite().sum())
    torch.testing.assert_close(
        gpg(rewards, group).abs().sum() / known,
        group_mean(rewards, group)[useful].abs().mean(),
        atol=0,
        rtol=1e-12,
    )


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(prompts_with_failures)
def test_length_weighted_leaves_no_weighted_sum(case: tuple[Tensor, Tensor]) -> None:
    """sum l A = 0 in every group, and with equal lengths it is the group mean."""
    rewards, group = case
    lengths = torch.arange(len(rewards)) % 5 + 1
    weighted = lengths * length_weighted(rewards, group, lengths)
    for g in range(3):
        assert abs(float(weighted[group == g].sum())) < 1e-9
    close(length_weighted(rewards, group, torch.full_like(lengths, 7)), group_mean(rewards, group))


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match="negative"):
        maxrl(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(prompts_with_failures)
@example((torch.tensor([3.0, 3.0, 1.0, NAN, 2.0]), torch.tensor([0, 0, 0, 1, 1])))
def test_top_gap_row_by_row(case: tuple[Tensor, Tensor]) -> None:
    rewards, group = case
    a = top_gap(rewards, group)
    for i, r in enumerate(rewards.tolist()):
        others = [
            o
            for j, o in enumerate(rewards.tolist())
            if j != i and group[j] == group[i] and math.isfinite(o)
        ]
        assert float(a[i]) == (max(0.0, r - max(others)) if others and math.isfinite(r) else 0.0)


def test_greedy_baseline_where_a_check_failed() -> None:
    a = greedy_baseline(
        torch.tensor([1.0, NAN, 1.0, 0.0]), torch.tensor([0.0, 0.0, NAN, float("inf")])
    )
    assert a.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_normalise_then_sum_lets_every_part_count() -> None:
    """A part a thousand times larger, or one that is constant, does not drown the others; a weight
    of 0 takes a part out.
    """
    parts, group = (
        torch.tensor([[1.0, 0.0], [0.0, 2000.0], [0.0, 0.0], [1.0, 1000.0]], dtype=torch.float64),
        torch.tensor([0, 0, 0, 0]),
    )
    both = torch.tensor([1.0, 1.0])
    scaled = parts * torch.tensor([1.0, 1e-3])
    torch.testing.assert_close(
        normalise_then_sum(parts, both, group, 0.0), normalise_then_sum(scaled, both, group, 0.0)
    )
    alone = normalise_then_sum(parts, torch.tensor([1.0, 0.0]), group, 0.0)
    torch.testing.assert_close(alone, group_zscore(parts[:, 0], group, 0.0))
    constant = torch.stack([parts[:, 0], torch.full((4,), 0.1)], -1)
    torch.testing.assert_close(normalise_then_sum(constant, both, group, 0.0), alone)


def test_a_part_that_does_not_apply_adds_nothing_and_a_row_without_parts_is_excluded() -> None:
    """By hand, weights 1 and 2: z-scores of (1, 0, 0.5) are +-s and 0 with s = sqrt(1.5); the
    second part applies to rows 0 and 2 alone, with z-scores of +-1.
    """
    parts = torch.tensor([[1.0, 0.5], [0.0, NAN], [0.5, 0.25], [NAN, NAN]], dtype=torch.float64)
    group, weights = torch.tensor([0, 0, 0, 0]), torch.tensor([1.0, 2.0])
    s = math.sqrt(1.5)
    total = torch.tensor([s + 2.0, -s, -2.0], dtype=torch.float64)
    a = normalise_then_sum(parts, weights, group, 0.0)
    torch.testing.assert_close(a[:3], total / total.std(correction=0))
    assert a[3] == 0
