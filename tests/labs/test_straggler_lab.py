"""Stragglers against the log-normal distribution, L22b's formula and its errata."""

from __future__ import annotations

import math
import random

import pytest

from sixfold_labs.catalogue import find
from sixfold_labs.straggler import dynamic_k
from sixfold_planning.stragglers import lognormal_lengths


@pytest.mark.parametrize(
    ("sigma", "k", "longest"), [(0.4, 8, 1.68), (0.4, 64, 2.40), (0.8, 8, 2.58), (0.8, 64, 5.08)]
)
def test_mean_longest_of_k_lengths(sigma: float, k: int, longest: float) -> None:
    draw = random.Random(0)
    variation = math.sqrt(math.exp(sigma**2) - 1)
    runs = [max(lognormal_lengths(draw, k, 100.0, variation)) / 100 for _ in range(1500)]
    assert sum(runs) / len(runs) == pytest.approx(longest, rel=0.04)
    outcome = find("straggler")(k=k, mean=1000, variation=variation)
    assert outcome.number("expected_longest") / 1000 == pytest.approx(longest, abs=0.006)


def test_lengths_have_the_given_mean_and_variation() -> None:
    sample = lognormal_lengths(random.Random(1), 20_000, 800.0, 1.0)
    mean = sum(sample) / len(sample)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in sample) / len(sample))
    assert mean == pytest.approx(800, rel=0.03)
    assert deviation / mean == pytest.approx(1.0, rel=0.06)


def test_bound_grows_by_26_percent_from_16_to_32_samples() -> None:
    bounds = [find("straggler")(k=k).number("longest_by_bound") / 800 for k in (16, 32)]
    assert bounds == pytest.approx([5.02, 6.33], abs=0.01)


def test_every_seed_gives_other_lengths() -> None:
    longest = {find("straggler")(seed=seed).number("rollout_tokens") for seed in range(20)}
    assert len(longest) == 20


@pytest.mark.slow
def test_cap_acts_on_groups_of_16() -> None:
    lab = find("straggler")
    limit = 800 * math.exp(1.645 * math.sqrt(math.log(2)) - math.log(2) / 2)
    changed = 0
    for seed in range(40):
        free, capped = lab(seed=seed), lab(seed=seed, cap=True)
        assert capped.number("rollout_tokens") <= 1.15 * limit
        assert capped.number("straggler_tax") <= free.number("straggler_tax")
        changed += capped.number("decode_saved") > 0
    # A group of 16 has a length above the 95th percentile with probability 1 - 0.95^16 = 0.56.
    assert changed / 40 == pytest.approx(0.56, abs=0.2)


def test_dynamic_k_ends_when_three_quarters_have_finished() -> None:
    kept = dynamic_k([8.0, 1.0, 2.0, 4.0], [1, 0, 1, 0], keep=3)
    assert kept.samples == [1, 2, 3]
    assert kept.end == 4.0
    outcome = find("straggler")(early_stop=True)
    assert outcome.values["kept_samples"] == 12
    assert outcome.number("straggler_tax") < find("straggler")().number("straggler_tax")
    assert outcome.number("decode_saved") > 0


def test_dynamic_k_waits_for_rewards_that_differ() -> None:
    kept = dynamic_k([8.0, 1.0, 2.0, 4.0, 16.0], [1, 0, 0, 0, 1], keep=3)
    assert kept.samples == [0, 1, 2]
    assert kept.end == 8.0
    assert dynamic_k([8.0, 1.0, 2.0, 4.0], [1, 1, 1, 1], keep=3).end == 8.0


@pytest.mark.parametrize("k", [2, 3, 4, 5, 16])
def test_dynamic_k_of_the_library_decides_the_same(k: int) -> None:
    lab = find("straggler")
    for seed in range(12):
        own = lab(k=k, seed=seed, early_stop=True)
        assert lab(k=k, seed=seed, early_stop=True, source="library") == own


def test_packing_trains_on_the_sum_of_the_lengths() -> None:
    padded, packed = find("straggler")(), find("straggler")(packing=True)
    assert packed.number("trainer_tokens") == pytest.approx(16 * packed.number("mean_tokens"))
    assert padded.number("trainer_tokens") == pytest.approx(16 * padded.number("rollout_tokens"))


def test_equal_lengths_have_no_tax() -> None:
    assert find("straggler")(variation=0.0).number("straggler_tax") == pytest.approx(0, abs=1e-9)
