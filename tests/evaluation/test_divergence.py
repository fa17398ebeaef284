"""The alarm starts when training reward and held-out accuracy part, and not for noise."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from sixfold.evaluation.divergence import Comparison, Divergence


def play(
    accuracy: Sequence[float],
    reward: Sequence[float],
    *,
    tasks: int = 100,
    seed: int = 0,
    noise: float = 0.05,
) -> list[Comparison | None]:
    """Evaluations of a made-up run, every 10 steps.

    Args:
        accuracy: probability that a held-out task is solved, for each evaluation.
        reward: mean training reward before each evaluation.
        tasks: number of held-out tasks. Each has a difficulty of its own.
        seed: seed of the noise.
        noise: standard deviation of the reward of one step.
    """
    rng = random.Random(seed)
    hard = [rng.random() for _ in range(tasks)]
    watch, found = Divergence(), []
    for number, (share, mean) in enumerate(zip(accuracy, reward, strict=True)):
        for _ in range(10):
            watch.reward(mean + rng.gauss(0, noise))
        flips = [rng.random() < 0.1 for _ in hard]
        values = [float((d < share) != flip) for d, flip in zip(hard, flips, strict=True)]
        found.append(watch.observe(10 * number, values))
    return found


def rising(count: int) -> list[float]:
    return [0.3 + 0.05 * n for n in range(count)]


def alarms(found: Sequence[Comparison | None]) -> list[int]:
    return [n for n, one in enumerate(found) if one and one.warning]


@pytest.mark.parametrize("seed", range(5))
def test_a_rising_reward_with_falling_held_out_accuracy_raises_one_alarm(seed: int) -> None:
    found = play([0.5, 0.6, 0.7, 0.7, 0.35, 0.3, 0.25], rising(7), seed=seed, tasks=300)
    assert alarms(found) == [4]
    assert [one.diverged for one in found[1:] if one] == [False] * 3 + [True] * 3
    last = found[4]
    assert last and last.change < -0.2 and "since step" in last.warning
    assert last.metrics() == {"heldout/change": last.change, "heldout/diverged": 1.0}


def test_noise_raises_hardly_any_alarm() -> None:
    """200 runs of 20 evaluations whose accuracy does not change, while the reward rises."""
    runs = [play([0.6] * 20, rising(20), tasks=60, seed=seed) for seed in range(200)]
    assert sum(bool(alarms(run)) for run in runs) <= 10


@pytest.mark.parametrize(
    ("accuracy", "reward"),
    [
        ([0.7, 0.7, 0.3, 0.3], [0.5, 0.6, 0.4, 0.3]),  # both fall: training fails, no hacking
        ([0.7, 0.7, 0.3, 0.3], [0.5] * 4),
        ([0.3, 0.5, 0.7, 0.9], rising(4)),
        ([0.7, 0.7, 0.68, 0.66], rising(4)),
    ],
)
def test_other_curves_raise_no_alarm(accuracy: list[float], reward: list[float]) -> None:
    assert alarms(play(accuracy, reward)) == []


def test_the_alarm_starts_again_after_it_has_cleared() -> None:
    found = play([0.8, 0.8, 0.3, 0.8, 0.3], rising(5))
    assert alarms(found) == [2, 4]


def test_an_evaluation_of_other_tasks_begins_anew() -> None:
    watch = Divergence()
    watch.reward(0.1)
    assert watch.observe(1, [1.0] * 50) is None
    watch.reward(0.9)
    assert watch.observe(2, [0.0] * 40) is None and watch.step == 2
    watch.reward(float("nan"))
    found = watch.observe(3, [0.0] * 40)
    assert found == Comparison(0.0, False, "")


def test_a_resumed_run_compares_with_the_same_best_evaluation() -> None:
    first, second = Divergence(), Divergence()
    for step in range(30):
        first.reward(0.1 + 0.001 * (step % 2))
    first.observe(30, [1.0] * 50)
    second.load(json.loads(json.dumps(first.state())))
    assert second == first and len(second.rewards) == 20
    for watch in (first, second):
        for step in range(30):
            watch.reward(0.8 + 0.001 * (step % 2))
    fallen = [1.0] * 20 + [0.0] * 30
    assert second.observe(60, fallen) == first.observe(60, fallen)
    assert second == first and first.active
