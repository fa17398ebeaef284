"""Rare weight syncs (lesson 6): shares of clipped steps and final rewards."""

from __future__ import annotations

import pytest

from sixfold_labs.catalogue import find

LAB = find("stale-weights")


@pytest.mark.parametrize(
    ("every", "clipped", "reward"),
    [
        (1, 0.0, 0.88),
        (2, 0.0, 0.88),
        (4, 0.085, 0.88),
        (8, 0.35, 0.872),
        (10, 0.50, 0.856),
        (20, 0.885, 0.576),
        (30, 0.93, 0.414),
        (40, 0.95, 0.334),
    ],
)
def test_clip_fraction_and_reward_by_sync_interval(
    every: int, clipped: float, reward: float
) -> None:
    outcome = LAB(sync_every=every)
    assert outcome.number("frac_clipped") == pytest.approx(clipped, abs=1e-9)
    assert outcome.number("reward_average") == pytest.approx(reward, abs=6e-4)


@pytest.mark.parametrize(("every", "verdict"), [(1, "healthy"), (4, "healthy"), (8, "stale")])
def test_verdict(every: int, verdict: str) -> None:
    assert LAB(sync_every=every).values["verdict"] == verdict


@pytest.mark.parametrize("every", [1, 2, 4, 8, 20, 40])
def test_log_ratio_after_a_sync_at_the_last_step_hides_the_staleness(every: int) -> None:
    outcome = LAB(sync_every=every, steps=200)
    assert outcome.number("log_ratio_after_last_sync") == 0
    assert outcome.number("largest_log_ratio") > 0.1


def test_library_clips_the_same_steps() -> None:
    for every in (4, 10):
        assert LAB(sync_every=every, source="library").values == LAB(sync_every=every).values
