"""Returns and advantages along a row: golden values, the textbook sums worked out slowly, and what
must hold for any table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from golden import ALGORITHM_CASES as GOLDEN
from golden import close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm import returns
from sixfold.algorithm.advantages import group_mean
from sixfold.algorithm.returns import (
    gae,
    known_tokens,
    process_returns,
    rewards_to_go,
    vtrace,
    whiten,
)
from sixfold.batch import final_rewards

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")
seeds = st.integers(0, 9999)
factors = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def golden(case: str, name: str, side: str = "inputs") -> Tensor:
    values = torch.tensor(GOLDEN[case][side][name], dtype=torch.float64)
    return values.bool() if name == "mask" else values


def random_tables(seed: int, b: int = 4, t: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, log_rho in float64, and a mask with holes, its last row empty."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, log_rho = torch.randn(3, b, t, generator=generator, dtype=torch.float64)
    mask = torch.rand(b, t, generator=generator) < 0.6
    mask[-1] = False
    return rewards, values, log_rho, mask


def junk(table: Tensor, mask: Tensor) -> Tensor:
    """The table with NaN and inf wherever the mask is False, and two columns of them on either
    side.
    """
    dirty = torch.where(
        mask,
        table,
        torch.tensor([NAN, INF, -INF], dtype=table.dtype)[torch.arange(mask.shape[1]) % 3],
    )
    side = torch.tensor([[NAN, -INF]], dtype=table.dtype).expand(len(table), 2)
    return torch.cat([side, dirty, side], 1)


def widened(mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (2, 2), value=False)


def slow_row(
    rewards: list[float],
    values: list[float],
    log_rho: list[float],
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[list[float], list[float]]:
    """V-trace's double sum (Espeholt et al. 2018, eq. 1), term by term, on one row's sampled
    tokens: O(T^2).
    """
    n = len(rewards)
    rho = [min(rho_bar, math.exp(x)) for x in log_rho]
    c = [lam * min(c_bar, math.exp(x)) for x in log_rho]
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    x = [
        sum(gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta[t] for t in range(s, n))
        for s in range(n)
    ]
    returns = [values[s] + x[s] for s in range(n)]
    # The bootstrap is lam parts return, 1 - lam parts value, of the next token.
    bootstrap = [
        lam * returns[s + 1] + (1 - lam) * values[s + 1] if s + 1 < n else 0.0 for s in range(n)
    ]
    return [rho[s] * (rewards[s] + gamma * bootstrap[s] - values[s]) for s in range(n)], returns


def slow(
    rewards: Tensor,
    values: Tensor,
    log_rho: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """`slow_row` on each row with the tokens that were not sampled cut out, and put back
    in place.
    """
    advantages, returns = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for row, here in enumerate(mask):
        a, v = slow_row(
            rewards[row, here].tolist(),
            values[row, here].tolist(),
            log_rho[row, here].tolist(),
            gamma,
            lam,
            rho_bar,
            c_bar,
        )
        advantages[row, here], returns[row, here] = (
            torch.tensor(a, dtype=torch.float64),
            torch.tensor(v, dtype=torch.float64),
        )
    return advantages, returns


@pytest.mark.parametrize("case", ["gae_plain", "gae_tool_obs_skipped", "gae_gamma099_lam1"])
def test_golden_gae(case: str) -> None:
    params, mask = GOLDEN[case]["params"], golden(case, "mask")
    advantages, returns = gae(
        golden(case, "rewards"), golden(case, "values"), mask, params["gamma"], params["lam"]
    )
    close(advantages, golden(case, "adv", "expected"))
    if case == "gae_gamma099_lam1":
        return
    close(returns, golden(case, "returns", "expected"))
    # The file whitens with the n - 1 form.
    n = int(mask.sum())
    close(
        whiten(advantages, mask) * math.sqrt((n - 1) / n), golden(case, "adv_whitened", "expected")
    )


def test_golden_rewards_to_go() -> None:
    case = "reward_kl_shaping_returns"
    close(
        rewards_to_go(golden(case, "token_rewards", "expected"), golden(case, "mask"), 1.0),
        golden(case, "returns", "expected"),
    )


def test_golden_reinforce_pp() -> None:
    rewards, mask = golden("adv_reinforcepp", "token_rewards"), golden("adv_reinforcepp", "mask")
    close(
        whiten(rewards_to_go(rewards, mask, 1.0), mask),
        golden("adv_reinforcepp", "adv_ddof0", "expected"),
    )
    case = "adv_reinforcepp_baseline"
    centred = group_mean(golden(case, "rewards"), golden(case, "group").long())
    mask = golden(case, "mask")
    close(whiten(centred[:, None].expand_as(mask), mask), golden(case, "adv_ddof0", "expected"))


def test_golden_process_returns() -> None:
    case = GOLDEN["adv_grpo_process"]
    step_rewards, step_mask, mask = (
        torch.zeros(3, 5).double(),
        torch.zeros(3, 5).bool(),
        torch.arange(5) < torch.tensor([[5], [4], [3]]),
    )
    for row, (ends, rewards) in enumerate(
        zip(case["inputs"]["step_end_index"], case["inputs"]["step_rewards"], strict=True)
    ):
        step_mask[row, ends] = True
        step_rewards[row, ends] = torch.tensor(rewards, dtype=torch.float64)
    # With eps times sqrt((n - 1) / n) too, the file's n - 1 form is ours times that.
    factor = math.sqrt((int(step_mask.sum()) - 1) / int(step_mask.sum()))
    advantages = (
        process_returns(
            step_rewards, step_mask, torch.zeros(3, dtype=torch.int64), mask, eps=1e-6 * factor
        )
        * factor
    )
    for row, expected in enumerate(case["expected"]["adv"]):
        close(advantages[row, : len(expected)], torch.tensor(expected))
        assert (advantages[row, len(expected) :] == 0).all()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seeds, factors, factors, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.3, 1.0]))
def test_the_recursions_are_the_double_sums(
    seed: int, gamma: float, lam: float, rho_bar: float, c_bar: float
) -> None:
    """With holes in the mask, for any truncation; and no truncation, no log_rho: GAE."""
    rewards, values, log_rho, mask = random_tables(seed)
    for ours, expected in zip(
        vtrace(rewards, values, log_rho, mask, gamma, lam, rho_bar, c_bar),
        slow(rewards, values, log_rho, mask, gamma, lam, rho_bar, c_bar),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)
    on_policy = torch.zeros_like(log_rho)
    for a, b, expected in zip(
        gae(rewards, values, mask, gamma, lam),
        vtrace(rewards, values, on_policy, mask, gamma, lam, 1.0, 1.0),
        slow(rewards, values, on_policy, mask, gamma, lam, 1.0, 1.0),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(a, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seeds, factors)
def test_gae_at_its_two_ends(seed: int, gamma: float) -> None:
    """lam 0: the TD error to the next sampled token. lam 1: the Monte Carlo return minus V. Returns
    are A + V on the mask, 0 elsewhere.
    """
    rewards, values, _, mask = random_tables(seed)
    td, returns = gae(rewards, values, mask, gamma, 0.0)
    for row, here in enumerate(mask):
        after = torch.cat([values[row, here][1:], torch.zeros(1).double()])[: int(here.sum())]
        torch.testing.assert_close(
            td[row, here], rewards[row, here] + gamma * after - values[row, here]
        )
    assert (td[~mask] == 0).all() and (returns[~mask] == 0).all()
    torch.testing.assert_close(returns[mask], (td + values)[mask])
    monte_carlo, _ = gae(rewards, values, mask, gamma, 1.0)
    torch.testing.assert_close(
        monte_carlo, rewards_to_go(rewards, mask, gamma) - values * mask, atol=1e-9, rtol=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(seeds, factors)
def test_rewards_to_go_is_the_discounted_sum(seed: int, gamma: float) -> None:
    rewards, _, _, mask = random_tables(seed)
    ours = rewards_to_go(rewards, mask, gamma)
    for row, here in enumerate(mask):
        mine = rewards[row, here].tolist()
        expected = [sum(gamma**n * r for n, r in enumerate(mine[s:])) for s in range(len(mine))]
        torch.testing.assert_close(
            ours[row, here], torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9
        )
    assert (ours[~mask] == 0).all()


def test_vtrace_by_hand() -> None:
    """Two tokens, ratios 2 and 1/2, bars of 1, gamma and lam 1. delta = [0 + 0.4 - 0.5, 1 - 0.4];
    x_2 = 0.5 * 0.6; x_1 = -0.1 + 1 * 0.3.
    """
    log_rho = torch.tensor([[math.log(2.0), math.log(0.5)]], dtype=torch.float64)
    advantages, returns = vtrace(
        torch.tensor([[0.0, 1.0]], dtype=torch.float64),
        torch.tensor([[0.5, 0.4]], dtype=torch.float64),
        log_rho,
        torch.ones(1, 2).bool(),
        1,
        1,
        1,
        1,
    )
    close(returns, torch.tensor([[0.7, 0.7]]))
    close(advantages, torch.tensor([[0.2, 0.3]]))


def test_vtrace_holds_a_ratio_that_would_overflow() -> None:
    rewards, values, _, mask = random_tables(3)
    far = torch.full_like(values, 2000.0)
    for far_off, ratio in ((far, math.exp(20)), (-far, math.exp(-20))):
        advantages, returns = vtrace(rewards, values, far_off, mask, 1.0, 0.0, INF, 1.0)
        assert advantages.isfinite().all() and returns.isfinite().all()
        torch.testing.assert_close(advantages, ratio * gae(rewards, values, mask, 1.0, 0.0)[0])


FUNCTIONS: list[Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = [
    lambda rewards, values, log_rho, mask: (rewards_to_go(rewards, mask, 0.9),),
    lambda rewards, values, log_rho, mask: gae(rewards, values, mask, 0.9, 0.8),
    lambda rewards, values, log_rho, mask: vtrace(
        rewards, values, log_rho, mask, 0.9, 0.8, 1.5, 1.0
    ),
    lambda rewards, values, log_rho, mask: (whiten(rewards, mask),),
    lambda rewards, values, log_rho, mask: (
        process_returns(rewards, mask, torch.tensor([0, 0, 1, 1]), mask, 1e-6),
    ),
]


@pytest.mark.mostly_slow(1)
@settings(max_examples=30, deadline=None)
@given(seeds)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_outside_the_mask_change_nothing(
    function: Callable[..., tuple[Tensor, ...]], seed: int
) -> None:
    *tables, mask = random_tables(seed)
    dirty = [junk(t, mask) for t in tables]
    for clean, padded in zip(function(*tables, mask), function(*dirty, widened(mask)), strict=True):
        assert (padded[~widened(mask)] == 0).all()
        torch.testing.assert_close(padded[:, 2:-2], clean, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS[:4])
def test_gradients_are_free_of_what_lies_under_the_mask(
    function: Callable[..., tuple[Tensor, ...]],
) -> None:
    *tables, mask = random_tables(11)
    dirty = [junk(t, mask).requires_grad_() for t in tables]
    sum(out.square().sum() for out in function(*dirty, widened(mask))).backward()  # type: ignore[union-attr]
    grads = [t.grad for t in dirty if t.grad is not None]
    assert grads and all(g.isfinite().all() and (g[~widened(mask)] == 0).all() for g in grads)
    assert any((g != 0).any() for g in grads)


@pytest.mark.mostly_slow(2)
@settings(max_examples=30, deadline=None)
@given(seeds)
@pytest.mark.parametrize("function", FUNCTIONS[:3])
def test_rows_do_not_see_each_other(function: Callable[..., tuple[Tensor, ...]], seed: int) -> None:
    *tables, mask = random_tables(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    for together, reordered in zip(
        function(*tables, mask), function(*(t[order] for t in tables), mask[order]), strict=True
    ):
        assert torch.equal(together[order], reordered)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_whose_checker_failed_takes_no_part(bad: float) -> None:
    """Advantage 0, for returns its own values (nothing for a critic to learn), and the other rows
    as they were.
    """
    rewards, values, log_rho, mask = random_tables(5)
    failed = rewards.clone()
    failed[1, int(mask[1].nonzero()[-1])] = bad
    others = [0, 2, 3]
    assert known_tokens(failed, mask).tolist() == [
        r if row != 1 else [False] * 7 for row, r in enumerate(mask.tolist())
    ]
    assert torch.equal(known_tokens(rewards, mask), mask)
    assert (rewards_to_go(failed, mask, 0.9)[1] == 0).all()
    for broken, whole in (
        (gae(failed, values, mask, 0.9, 0.8), gae(rewards, values, mask, 0.9, 0.8)),
        (
            vtrace(failed, values, log_rho, mask, 0.9, 0.8, 1.0, 1.0),
            vtrace(rewards, values, log_rho, mask, 0.9, 0.8, 1.0, 1.0),
        ),
    ):
        assert (broken[0][1] == 0).all()
        assert torch.equal(broken[1][1], values[1] * mask[1])
        assert torch.equal(broken[0][others], whole[0][others]) and torch.equal(
            broken[1][others], whole[1][others]
        )


def test_a_failed_step_takes_its_whole_row_out_of_the_group() -> None:
    step_rewards = torch.tensor([[0.0, 1.0], [NAN, 9.0], [0.5, 0.0]], dtype=torch.float64)
    mask, group, keep = torch.ones(3, 2).bool(), torch.tensor([0, 0, 0]), torch.tensor([0, 2])
    advantages = process_returns(step_rewards, mask, group, mask, 1e-6)
    assert (advantages[1] == 0).all()
    torch.testing.assert_close(
        advantages[keep],
        process_returns(step_rewards[keep], mask[keep], group[keep], mask[keep], 1e-6),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seeds)
def test_process_returns_step_by_step(seed: int) -> None:
    rewards, _, chance, mask = random_tables(seed, b=5)
    step_mask, group = chance > 0, torch.tensor([0, 1, 0, 1, 1])
    ours = process_returns(rewards, step_mask, group, mask, eps=1e-6)
    for row in range(5):
        pool = rewards[group == group[row]][step_mask[group == group[row]]]
        for t in range(7):
            later = [float(rewards[row, s]) for s in range(t, 7) if step_mask[row, s]]
            std = float(pool.std(correction=0)) if len(pool) > 1 else 0.0
            expected = sum((r - float(pool.mean())) / (std + 1e-6) for r in later) if std else 0.0
            assert float(ours[row, t]) == pytest.approx(expected if mask[row, t] else 0.0, abs=1e-8)


def test_process_returns_of_one_step_at_the_end_is_the_zscore_of_outcomes() -> None:
    """And equal step rewards are degenerate: exactly 0, though 0.1 is no binary number."""
    mask, group = torch.tensor([[True] * 3, [True, True, False]]), torch.tensor([0, 0])
    outcome = torch.tensor([[NAN, NAN, 1.0], [NAN, 0.0, NAN]])
    step_mask = outcome.isfinite()
    close(
        process_returns(outcome, step_mask, group, mask, eps=0.0),
        torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]),
    )
    assert (process_returns(torch.full((2, 3), 0.1), mask, group, mask, 1e-6) == 0).all()


def off_by_one(rewards: Tensor, values: Tensor, mask: Tensor, advantages: Tensor) -> bool:
    """False if each row's reward is on its last sampled token, A there is r - V there, and no token
    off the mask has an advantage.
    """
    rows, last = torch.arange(len(mask)), (mask * torch.arange(mask.shape[1])).argmax(-1)
    lands = torch.equal(rewards != 0, torch.nn.functional.one_hot(last, mask.shape[1]).bool())
    holds = torch.allclose(advantages[rows, last], (rewards - values)[rows, last], atol=1e-6)
    return not (lands and holds and bool((advantages[~mask] == 0).all()))


def test_an_advantage_shifted_by_one_index_is_caught() -> None:
    """Prompt, two sampled tokens, tool output, two sampled tokens, padding; and a row that ends
    earlier. Only the last sampled token is rewarded.
    """
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0]]).bool()
    rewards = final_rewards([1.0, 2.0], mask)
    values = torch.tensor(
        [[9.0, 9.0, 0.1, 0.2, 9.0, 0.3, 0.4, 9.0], [9.0, 0.5, 0.6, 0.7, 9.0, 9.0, 9.0, 9.0]]
    )
    for lam in (0.0, 0.95, 1.0):
        advantages, _ = gae(rewards, values, mask, 1.0, lam)
        assert not off_by_one(rewards, values, mask, advantages)
        for shift in (-1, 1):
            assert off_by_one(rewards, values, mask, advantages.roll(shift, 1))
            assert off_by_one(rewards, values, mask, advantages.roll(shift, 1) * mask)
            assert off_by_one(
                rewards, values, mask, gae(rewards, values.roll(shift, 1), mask, 1.0, lam)[0]
            )
            assert off_by_one(
                rewards.roll(shift, 1),
                values,
                mask,
                gae(rewards.roll(shift, 1), values, mask, 1.0, lam)[0],
            )


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.25, 1.0, 8.0]), st.sampled_from([-4.0, 0.0, 16.0]))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int, scale: float, shift: float) -> None:
    table, _, _, mask = random_tables(seed)
    with patch.object(returns, "WHITEN_EPS", 0.0):
        white, plain = whiten(table * scale + shift, mask), whiten(table, mask)
    if int(mask.sum()) > 1:
        close(white[mask].mean(), torch.tensor(0.0))
        close(white[mask].square().mean(), torch.tensor(1.0))
    torch.testing.assert_close(white, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e6])
def test_whitening_equal_tokens_gives_exactly_zero(value: float) -> None:
    """In float32 their mean can be off by rounding, and 1 / sqrt(1e-8) would make it an
    advantage.
    """
    for mask in (
        torch.ones(3, 7).bool(),
        torch.arange(7) < torch.tensor([[5], [1], [0]]),
        torch.zeros(3, 7).bool(),
    ):
        assert (whiten(torch.full((3, 7), value), mask) == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_and_float64_agree_and_stay_what_they_are(
    function: Callable[..., tuple[Tensor, ...]],
) -> None:
    *tables, mask = random_tables(8)
    for double, single in zip(
        function(*tables, mask), function(*(t.float() for t in tables), mask), strict=True
    ):
        assert double.dtype == torch.float64 and single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, atol=1e-5, rtol=1e-5)


def test_shapes_are_checked() -> None:
    good, bad, mask = torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3).bool()
    group = torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: rewards_to_go(bad, mask, 1.0),
        lambda: gae(good, bad, mask, 1.0, 1.0),
        lambda: vtrace(good, good, bad, mask, 1.0, 1.0, 1.0, 1.0),
        lambda: whiten(torch.zeros(3), torch.ones(3).bool()),
        lambda: process_returns(good, mask, group, torch.ones(2, 4).bool(), 1e-6),
    ):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            call()
    with pytest.raises(ValueError, match="B = 2"):
        process_returns(good, mask, torch.zeros(3, dtype=torch.int64), mask, 1e-6)
