"""Reward shaping: golden values, values by hand, and what whitening per source is for."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from golden import ALGORITHM_CASES as CASES
from golden import close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.advantages import group_mean
from sixfold.algorithm.parts import COSINE
from sixfold.algorithm.shaping import (
    RunningWhiten,
    cosine_length_reward,
    kimi_length_reward,
    overlong_penalty,
    stop_properly,
)

torch.set_num_threads(1)


def _vector(case: str, name: str, side: str = "inputs") -> Tensor:
    return torch.tensor(CASES[case][side][name], dtype=torch.float64)


def test_golden_overlong_penalty() -> None:
    p = CASES["dapo_soft_overlong"]["params"]
    lengths = _vector("dapo_soft_overlong", "lengths")
    for given_as in (lengths, lengths.long()):
        close(
            overlong_penalty(given_as, p["L_max"], p["L_cache"]),
            _vector("dapo_soft_overlong", "penalty", "expected"),
        )


def test_overlong_penalty_scales_and_spares_rows_that_ended() -> None:
    lengths = torch.tensor([5, 8, 10, 10])
    assert overlong_penalty(lengths, 10, 4, penalty=2.0).tolist() == [0.0, -1.0, -2.0, -2.0]
    assert overlong_penalty(
        lengths, 10, 4, 2.0, truncated=torch.tensor([True, False, False, True])
    ).tolist() == [0.0, 0.0, 0.0, -2.0]
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, 10, buffer)


def test_golden_kimi_length_reward() -> None:
    case = "kimi15_length_reward"
    lengths, correct = _vector(case, "lengths"), _vector(case, "correct").bool()
    group = torch.zeros(4, dtype=torch.int64)
    close(kimi_length_reward(lengths, correct, group), _vector(case, "length_reward", "expected"))
    close(
        kimi_length_reward(lengths, torch.ones(4, dtype=torch.bool), group),
        _vector(case, "lam", "expected"),
    )


def test_kimi_length_reward_is_the_groups_own() -> None:
    """Interleaved with another group it is unchanged, in any order; a group of one length
    gets 0.
    """
    lengths, correct = (
        torch.tensor([100, 7, 200, 400, 7, 300]),
        torch.tensor([True, True, False, True, False, False]),
    )
    group = torch.tensor([1, 0, 1, 1, 0, 1])
    expected = torch.tensor([0.5, 0.0, 0.0, -0.5, 0.0, -1 / 6])
    close(kimi_length_reward(lengths, correct, group), expected)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    close(kimi_length_reward(lengths[order], correct[order], group[order]), expected[order])


def test_golden_cosine_length_reward() -> None:
    lengths = _vector("cosine_length_reward", "lengths")
    for name, correct in (("correct", True), ("wrong", False)):
        reward = cosine_length_reward(lengths, torch.full((5,), correct), 4096, *COSINE)
        close(reward, _vector("cosine_length_reward", name, "expected"))


def test_cosine_length_reward_by_hand() -> None:
    """TRL's constants, at both ends and in the middle; `exceed` from the limit on."""
    lengths, correct = (
        torch.tensor([0, 50, 50, 99, 100, 120]),
        torch.tensor([True, True, False, False, True, False]),
    )
    reward = cosine_length_reward(lengths, correct, 100, 1.0, 0.5, -1.0, -0.5, exceed=-3.0)
    nearly = -0.5 - 0.5 * (1 + math.cos(math.pi * 0.99)) / 2
    assert reward.tolist() == pytest.approx([1.0, 0.75, -0.75, nearly, -3.0, -3.0])


def test_stop_properly_by_hand() -> None:
    rewards, truncated = (
        torch.tensor([1.0, 1.0, -1.0, torch.nan]),
        torch.tensor([False, True, True, True]),
    )
    assert stop_properly(rewards, truncated, 0.25).tolist() == [
        1.0,
        0.25,
        -0.25,
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert stop_properly(rewards, truncated, 0.0).tolist()[:3] == [1.0, 0.0, 0.0]
    replaced = stop_properly(rewards, truncated, -0.5)
    assert replaced.tolist()[:3] == [1.0, -0.5, -0.5] and bool(replaced[3].isnan())
    with pytest.raises(ValueError, match="stop_properly"):
        stop_properly(rewards, truncated, 1.5)


def _two_sources() -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, source and group of 40 groups of 8: a verifier's 0 and 1, and a reward model's
    scores around 300 with a spread of 50.
    """
    g = torch.Generator().manual_seed(0)
    group = torch.arange(40).repeat_interleave(8)
    source = group % 2
    verifier = (torch.rand(320, generator=g) < 0.5).double()
    return (
        torch.where(source == 0, verifier, 300 + 50 * torch.randn(320, generator=g).double()),
        source,
        group,
    )


def test_whitening_per_source_equalises_the_scale_of_advantages() -> None:
    rewards, source, group = _two_sources()
    whiten, together = RunningWhiten(clip=10.0), RunningWhiten(clip=10.0)
    whiten.update(rewards, source)
    together.update(rewards, torch.zeros_like(source))

    def scales(reshaped: Tensor) -> tuple[float, float]:
        advantages = group_mean(reshaped, group)
        return float(advantages[source == 0].std()), float(advantages[source == 1].std())

    for first, second, low, high in (
        (*scales(whiten(rewards, source)), 0.9, 1.1),
        (*scales(together(rewards, torch.zeros_like(source))), 50, 200),
    ):
        assert low < second / first < high


def test_whitening_is_mean_and_population_std_of_all_rewards_so_far() -> None:
    """Fed in uneven pieces, against the statistics of the whole."""
    rewards, source, _ = _two_sources()
    whiten = RunningWhiten(clip=100.0)
    for piece in (slice(0, 1), slice(1, 100), slice(100, 101), slice(101, 320)):
        whiten.update(rewards[piece], source[piece])
    out = whiten(rewards, source)
    for number in (0, 1):
        mine = rewards[source == number]
        close(out[source == number], (mine - mine.mean()) / mine.std(correction=0))


def test_outliers_are_clipped_but_counted() -> None:
    """One reward of 1000 among zeros and ones comes out at the clip, on its own side; the
    statistics are those of all.
    """
    rewards = torch.tensor([0.0, 1.0] * 50 + [1000.0])
    source = torch.zeros(101, dtype=torch.int64)
    whiten = RunningWhiten(clip=3.0)
    whiten.update(rewards, source)
    assert (
        whiten(rewards, source).tolist()[-1] == 3.0
        and whiten(-rewards, source).tolist()[-1] == -3.0
    )
    assert whiten.state()["0"][1] == pytest.approx(1050 / 101)


def test_a_rare_success_does_not_fade() -> None:
    """One reward in two hundred is 14 std away, beyond the clip, and after many steps still comes
    out at the clip and not at 0.
    """
    rewards = torch.zeros(200)
    rewards[0] = 1.0
    source = torch.zeros(200, dtype=torch.int64)
    whiten = RunningWhiten(clip=5.0)
    for _ in range(50):
        whiten.update(rewards, source)
    out = whiten(rewards, source)
    assert float(out[0]) == 5.0 and float(out[1]) == pytest.approx(
        -0.005 / math.sqrt(0.005 * 0.995), rel=1e-4
    )


def test_failed_checks_are_left_out_and_stay_failed() -> None:
    rewards, source = torch.tensor([1.0, torch.nan, 3.0, torch.nan]), torch.tensor([0, 0, 0, 1])
    whiten = RunningWhiten(clip=5.0)
    whiten.update(rewards, source)
    out = whiten(rewards, source)
    assert out[[0, 2]].tolist() == pytest.approx([-1.0, 1.0]) and bool(out[[1, 3]].isnan().all())


def test_equal_rewards_whiten_to_nothing() -> None:
    rewards, source = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    whiten = RunningWhiten(clip=5.0)
    for _ in range(3):
        whiten.update(rewards, source)
    assert whiten(rewards, source).tolist() == pytest.approx([0.0] * 7, abs=1e-6)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 3)), min_size=1, max_size=40),
    st.randoms(),
)
@settings(max_examples=50, deadline=None)
def test_state_survives_json_and_the_order_of_rows_does_not_matter(
    rows: list[tuple[float, int]], random: Any
) -> None:
    shuffled = rows[:]
    random.shuffle(shuffled)

    def trained(on: list[tuple[float, int]]) -> RunningWhiten:
        whiten = RunningWhiten(clip=4.0)
        for piece in (on[: len(on) // 2], on[len(on) // 2 :]):
            if piece:
                whiten.update(
                    torch.tensor([r for r, _ in piece], dtype=torch.float64),
                    torch.tensor([s for _, s in piece]),
                )
        return whiten

    one, other = trained(rows), trained(shuffled)
    rewards, source = (
        torch.tensor([r for r, _ in rows], dtype=torch.float64),
        torch.tensor([s for _, s in rows]),
    )
    back = RunningWhiten(clip=4.0)
    back.load(json.loads(json.dumps(one.state())))
    assert torch.equal(back(rewards, source), one(rewards, source))
    for number, moments in one.state().items():
        assert other.state()[number] == pytest.approx(moments, rel=1e-6, abs=1e-6)
    # A restored one also goes on as if nothing had happened.
    for whiten in (one, back):
        whiten.update(rewards * 2 + 1, source)
    assert one.state() == back.state()


def test_refusals() -> None:
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: overlong_penalty(two, 10, 4, truncated=one.bool()),
        lambda: kimi_length_reward(two, one, two),
        lambda: cosine_length_reward(two, one, 10, *COSINE),
        lambda: stop_properly(two.float(), one.bool(), 0.5),
        lambda: RunningWhiten(1.0).update(two.float(), one),
        lambda: overlong_penalty(two[None], 10, 4),
    ):
        with pytest.raises(ValueError, match=r"\[B\]"):
            call()
    with pytest.raises(ValueError, match="clip"):
        RunningWhiten(0.0)
    with pytest.raises(ValueError, match="source 0"):
        RunningWhiten(1.0)(two.float(), two)
