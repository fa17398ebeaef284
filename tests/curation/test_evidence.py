"""When rollouts decide about a task: shares of simulated tasks against the binomial formula."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sixfold.data.profile import Measurement, TaskProfile
from sixfold_curation.evidence import LEVEL, Rule


def sampled(
    rule: Rule, rate: float, rng: random.Random, wrong: str = "", broken: int = 0
) -> TaskProfile:
    """A task with this pass rate, after all rounds that the rule asks for.

    Args:
        wrong: answer of all rollouts that do not solve it. "": none.
        broken: checks of each round that fail.
    """
    found = None
    for seed in range(rule.rounds):
        if rule.lacks(found, seed):
            checked = rule.samples - broken
            solved = sum(rng.random() < rate for _ in range(checked))
            failed = checked - solved
            rewards = (1.0,) * solved + (0.0,) * failed
            others = {wrong: failed} if wrong else {}
            new = Measurement("t", "t", seed, solved, rewards, broken, others=others)
            found = TaskProfile((*(found.measured if found else ()), new))
    assert found
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("samples", "bound", "most"), [(8, 0.05, 64), (8, 0.1, 32), (5, 0.2, 15)])
def test_share_that_is_held_is_that_of_an_exact_test(samples: int, bound: float, most: int) -> None:
    """Held with probability (1 - p)^n, n = ln 0.05 / ln(1 - bound) in whole rounds: at most 5 % at
    the bound. The upper end is its mirror image.
    """
    rule, rng, tasks = Rule(samples, bound, 1 - bound), random.Random(bound), 600
    for rate in (0.0, bound / 4, bound, 2 * bound, 0.34, 0.5):
        lower = [sampled(rule, rate, rng) for _ in range(tasks)]
        upper = [sampled(rule, 1 - rate, rng) for _ in range(tasks)]
        expected = (1 - rate) ** most
        assert rate < bound or expected <= LEVEL
        spread = 4 * math.sqrt(expected * (1 - expected) / tasks) + 1e-3
        held = sum(rule.bucket(one) == "held_hard" for one in lower) / tasks
        easy = sum(rule.bucket(one) == "easy" for one in upper) / tasks
        assert held == pytest.approx(expected, abs=spread)
        assert easy == pytest.approx(expected, abs=spread)
        # After n rounds of K, (1 - p)^(K n) + p^(K n) go on.
        ends = range(samples, most, samples)
        rounds = [rate**end + (1 - rate) ** end for end in ends]
        mean = sum(one.rollouts for one in lower) / tasks
        assert mean == pytest.approx(samples * (1 + sum(rounds)), rel=0.2)


def test_no_task_is_held_after_one_round_of_eight() -> None:
    """0 of 8 has the 95 % interval [0, 0.32]."""
    rule = Rule(8, 0.05, 0.95)
    for solved in (0, 8):
        found = TaskProfile((Measurement("t", "t", 0, solved, (0.0,) * 8),))
        assert rule.bucket(found) == "train" and not rule.decides(found)
    assert rule.decides(TaskProfile((Measurement("t", "t", 0, 1, (0.0,) * 8),)))


def test_many_rollouts_decide_although_some_solve_the_task() -> None:
    """3 of 200 refuse a pass rate of 5 % (P = 0.009), 3 of 100 do not (P = 0.26)."""
    rule = Rule(8, 0.05, 0.95)
    for count, bucket in ((200, "held_hard"), (100, "train"), (5000, "held_hard")):
        found = TaskProfile((Measurement("t", "t", 0, 3, (0.0,) * count),))
        assert rule.bucket(found) == bucket


def test_bounds_of_0_and_1_hold_and_drop_none() -> None:
    rule = Rule(8, 0.0, 1.0)
    for rate in (0.0, 1.0):
        for wrong in ("", "117"):
            found = sampled(rule, rate, random.Random(0), wrong)
            assert (found.rollouts, rule.bucket(found)) == (8, "train")


def test_wrong_references_are_told_from_hard_tasks() -> None:
    """Rollouts that agree on another answer are a reason, and hold no more tasks than the test."""
    rule, rng, tasks = Rule(8, 0.05, 0.95), random.Random(1), 500
    wrong = [sampled(rule, 0.0, rng, "117") for _ in range(tasks)]
    assert {rule.bucket(one) for one in wrong} == {"held_conflict"}
    assert {(one.rollouts, one.rival) for one in wrong} == {(64, ("117", 64))}
    # A task at the bound that is otherwise always missed in the same way.
    biased = [sampled(rule, 0.05, rng, "117") for _ in range(tasks)]
    held = sum(rule.bucket(one) != "train" for one in biased) / tasks
    expected = 0.95**64
    assert held == pytest.approx(expected, abs=4 * math.sqrt(expected / tasks))


@pytest.mark.parametrize("votes", [24, 39, 40])
def test_a_minority_or_a_bare_majority_is_no_conflict(votes: int) -> None:
    """39 of 64 may be a share of 0.49. 40 of 64 is above one half."""
    found = TaskProfile((Measurement("t", "t", 0, 0, (0.0,) * 64, others={"117": votes, "9": 1}),))
    expected = "held_conflict" if votes == 40 else "held_hard"
    assert Rule(8, 0.05, 0.95).bucket(found) == expected


def test_a_task_that_was_solved_once_is_no_conflict() -> None:
    """1 of 128 is below the bound, and 120 agree on another answer: the reference can be right."""
    rewards = (1.0, *[0.0] * 127)
    found = TaskProfile((Measurement("t", "t", 0, 1, rewards, others={"117": 120}),))
    assert Rule(8, 0.05, 0.95).bucket(found) == "held_hard"


def test_votes_are_counted_among_rollouts_whose_answers_are_known() -> None:
    """32 of 64 were measured when no answers were stored. All others agree."""
    rounds = [Measurement("t", "t", seed, 0, (0.0,) * 32) for seed in range(2)]
    rule = Rule(8, 0.05, 0.95)
    assert rule.bucket(TaskProfile(tuple(rounds))) == "held_hard"
    known = replace(rounds[1], others={"117": 32})
    assert rule.bucket(TaskProfile((rounds[0], known))) == "held_conflict"


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize(("broken", "rounds"), [(1, 9), (4, 15), (7, 16)])
def test_rollouts_with_failed_checks_are_made_up_for(rate: float, broken: int, rounds: int) -> None:
    """59 checked rollouts decide at 0.05. At most 128 rollouts are tried."""
    rule = Rule(8, 0.05, 0.95)
    found = sampled(rule, rate, random.Random(0), broken=broken)
    bucket = "train" if broken == 7 else "easy" if rate else "held_hard"
    assert (len(found.measured), rule.bucket(found)) == (rounds, bucket)


def test_checks_that_always_fail_are_not_tried_again() -> None:
    found = TaskProfile((Measurement("t", "t", 0, 0, (), failed=8),))
    assert Rule(8, 0.05, 0.95).decides(found)
