"""Random groups of the simulation: truncated log-normal lengths, and groups of an earlier run."""

from __future__ import annotations

import math
from random import Random

import pytest

from sixfold.errors import UserError
from sixfold_planning.simulate.groups import (
    LogNormalGroups,
    RecordedGroup,
    RecordedGroups,
    truncated_mean,
)


def test_truncated_lengths_have_the_given_mean() -> None:
    groups = LogNormalGroups(mean=1000, variation=0.8, longest=2000, pass_rate=0.5)
    random = Random(0)
    lengths = [length for _ in range(600) for length in groups.draw(random, 10).lengths]
    mean = sum(lengths) / len(lengths)
    deviation = math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    assert abs(mean - 1000) < 4 * deviation / math.sqrt(len(lengths))
    assert max(lengths) == 2000


@pytest.mark.parametrize("longest", [0.5, 1.0, 3.0])
def test_mean_of_a_truncated_length(longest: float) -> None:
    """The integral of the survival function P(X > x) from 0 to the bound."""
    sigma, steps = 0.7, 4000
    total = 0.0
    for i in range(steps):
        x = longest * (i + 0.5) / steps
        z = (math.log(x) + sigma**2 / 2) / sigma
        total += 0.5 * math.erfc(z / math.sqrt(2)) * longest / steps
    assert truncated_mean(1.0, sigma, longest) == pytest.approx(total, rel=1e-5)


def test_lengths_without_room_or_variation_are_equal() -> None:
    for variation, longest in ((0.8, 500.0), (0.0, 2000.0)):
        groups = LogNormalGroups(mean=500, variation=variation, longest=longest, pass_rate=0.5)
        assert set(groups.draw(Random(0), 50).lengths) == {500}


def test_a_subset_of_a_recorded_group_is_unbiased() -> None:
    """Two of four samples, of which two are right: rewards differ in 4 of 6 pairs."""
    groups = RecordedGroups([RecordedGroup((1, 2, 3, 4), (1.0, 1.0, 0.0, 0.0))])
    random, trials = Random(0), 4000
    drawn = [groups.draw(random, 2) for _ in range(trials)]
    mixed = sum(one.mixed for one in drawn) / trials
    assert abs(mixed - 4 / 6) < 4 * math.sqrt(2 / 9 / trials)
    assert {one.mixed for one in drawn if set(one.lengths) == {1, 2}} == {False}
    assert {one.mixed for one in drawn if set(one.lengths) == {2, 3}} == {True}


def test_recorded_groups_that_are_too_small_are_left_out() -> None:
    small, large = RecordedGroup((5,), (1.0,)), RecordedGroup((7, 0, 9), (None, None, 1.0))
    groups = RecordedGroups([small, large])
    for seed in range(10):
        drawn = groups.draw(Random(seed), 3)
        # A length of 0 counts as 1, and a failed check has no reward to differ by.
        assert sorted(drawn.lengths) == [1, 7, 9] and not drawn.mixed
    assert (groups.largest, groups.mean, groups.solved) == (3, 22 / 4, 1.0)
    with pytest.raises(UserError, match="at most 3 samples, not 4"):
        groups.draw(Random(0), 4)
