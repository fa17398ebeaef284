"""Figures of a reward model, and its calibration, on scores that were made up."""

from __future__ import annotations

import math

import pytest
import torch

from sixfold.evaluation.statistics import bounded_interval
from sixfold.reward_model.calibration import Calibration, calibrate
from sixfold.reward_model.quality import length_correlation, quality
from sixfold.reward_model.scorer import combined


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_figures_of_a_few_pairs() -> None:
    delta = torch.tensor([0.0, 0.2, -0.7, 1.0, 3.0, 3.0, 4.0, 9.0])
    found = quality(delta, torch.arange(8))
    assert found.accuracy == bounded_interval([0.5, 1, 0, 1, 1, 1, 1, 1])
    # The first comparison has three pairs. It counts as much as the others, of one pair each.
    several = quality(delta, torch.tensor([0, 0, 0, 2, 3, 4, 5, 6]))
    assert several.accuracy == bounded_interval([0.5, 1, 1, 1, 1, 1])
    assert found.histogram == [2, 1, 1, 2, 1, 1]
    assert found.healthy == pytest.approx(5 / 8)
    gaps = [
        2 * abs((sigma(0) + sigma(0.2)) / 2 - 0.75),
        abs(sigma(0.7) - 0.0),
        *(abs(sigma(x) - 1) for x in (1.0, 3.0, 3.0, 4.0, 9.0)),
    ]
    assert found.calibration_error == pytest.approx(sum(gaps) / 8)


def test_a_model_that_is_right_as_often_as_it_promises_is_calibrated() -> None:
    """sigma(1) = 0.73 and sigma(3) = 0.95."""
    one = torch.where(torch.arange(10_000) < 7311, 1.0, -1.0)
    three = torch.where(torch.arange(10_000) < 9526, 3.0, -3.0)
    alone = torch.arange(20_000)
    assert quality(torch.cat([one, three]), alone).calibration_error < 1e-4
    assert quality(torch.cat([one, 3 * one]), alone).calibration_error == pytest.approx(
        0.1108, abs=1e-3
    )


def test_without_its_slope_a_length_bias_is_gone_and_the_order_of_equal_lengths_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(60).repeat_interleave(4)
    lengths = torch.randint(1, 90, (240,), generator=generator).double()
    worth = torch.randn(240, generator=generator, dtype=torch.float64)
    # Long prompts get other scores: that is no bias between completions of one prompt.
    biased = worth + 0.05 * lengths + groups.double()
    assert length_correlation(biased, lengths, groups) > 0.7
    found = calibrate(biased, lengths, groups, normalise=True, debias=True)
    rewards = found.reward(biased, lengths)
    assert abs(length_correlation(rewards, lengths, groups)) < 1e-9
    assert found.length_slope == pytest.approx(0.05, abs=0.01)
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-9)
    assert float(rewards.std(correction=0)) == pytest.approx(1)
    plain = calibrate(biased, lengths, groups, normalise=True, debias=False)
    assert plain.length_slope == 0 and length_correlation(
        plain.reward(biased, lengths), lengths, groups
    ) == pytest.approx(length_correlation(biased, lengths, groups))


def test_scores_that_do_not_differ_have_no_scale() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    found = calibrate(zeros, zeros + 3, groups, normalise=True, debias=True)
    assert found == Calibration(0.0, 1.0, 0.0, 3.0)


def test_an_ensemble_is_a_mean_less_deviations() -> None:
    rewards = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])]
    mean, std = combined(rewards, 0.0)
    assert mean.tolist() == [2.0, 0.0] and std.tolist() == [1.0, 0.0]
    assert combined(rewards, 2.0)[0].tolist() == [0.0, 0.0]
