"""Switches of the weight sync against L22c."""

from __future__ import annotations

import itertools

import pytest

from sixfold_labs.catalogue import find

SHARES = {"tree": 0.55, "buckets": 0.45, "fp8": 0.30, "zero_copy": 0.22, "overlap": 0.0}
"""L22c: time that is left after each optimisation and those before it."""


def test_relative_times_of_the_course() -> None:
    lab = find("weight-sync")
    assert lab().values["relative"] == 1
    for count, share in enumerate(SHARES.values(), start=1):
        outcome = lab(**dict.fromkeys(list(SHARES)[:count], True))
        assert outcome.number("relative") == pytest.approx(share)
        assert [row[2] for row in outcome.tables[0].rows] == pytest.approx(
            [1, *list(SHARES.values())[:count]]
        )


def test_any_set_of_switches_multiplies_their_ratios() -> None:
    ratios = [0.55, 0.45 / 0.55, 0.30 / 0.45, 0.22 / 0.30]
    for switches in itertools.product([False, True], repeat=4):
        expected = 1.0
        for on, ratio in zip(switches, ratios, strict=True):
            expected *= ratio if on else 1
        outcome = find("weight-sync")(**dict(zip(SHARES, switches, strict=False)))
        assert outcome.number("relative") == pytest.approx(expected)
        assert outcome.values["extra_staleness"] == 0


def test_overlap_hides_the_sync_and_makes_one_batch_stale() -> None:
    outcome = find("weight-sync")(overlap=True)
    assert outcome.values["sync_seconds"] == 0
    assert outcome.values["extra_staleness"] == 1


def test_seconds_of_70b_by_hand() -> None:
    """140 GB: 7/8 over 300 GB/s, then twice over 50 GB/s. L22c: 2 to 10 s in all."""
    outcome = find("weight-sync")()
    assert outcome.number("gather_seconds") == pytest.approx(140 * 7 / 8 / 300)
    assert outcome.number("broadcast_seconds") == pytest.approx(2.8)
    assert outcome.number("plain_seconds") == pytest.approx(140 * 7 / 8 / 300 + 5.6)
    assert outcome.number("tax") == pytest.approx(outcome.number("plain_seconds") / 60)


def test_a_tree_spreads_the_sends() -> None:
    """R-176: of 63 engines, the trainer sends to each, or to 6."""
    assert find("weight-sync")(engines=63).values["most_sends"] == 63
    assert find("weight-sync")(engines=63, tree=True).values["most_sends"] == 6
