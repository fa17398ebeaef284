"""Long completions: the longest sample of a group decides how long a rollout takes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome
from sixfold_planning.stragglers import (
    exact_longest,
    expected_longest,
    lognormal_lengths,
    straggler_tax,
)

from .controls import seed_control, source_control

POOL = 2000
CAP = 0.95
FINISHED = 0.75
"""Share of the samples that dynamic K keeps."""


@dataclass(frozen=True)
class Kept:
    """Samples that are kept, by index, and the length at which the others are aborted."""

    samples: list[int]
    end: float


def dynamic_k(decoded: Sequence[float], rewards: Sequence[int], keep: int) -> Kept:
    """Keep the first samples that finish, and wait until two rewards differ.

    If the first `keep` rewards are equal, the first sample with another reward replaces the last
    of them. If all rewards are equal, all samples finish.

    Args:
        decoded: length of every sample.
        keep: samples to keep, at least 2.
    """
    order = sorted(range(len(decoded)), key=decoded.__getitem__)
    last = keep
    while last < len(order) and len({rewards[i] for i in order[:last]}) == 1:
        last += 1
    differs = rewards[order[last - 1]] != rewards[order[0]]
    kept = [*order[: keep - 1], order[last - 1]] if differs else order[:keep]
    return Kept(sorted(kept), decoded[order[last - 1]])


def library_dynamic_k(decoded: Sequence[float], rewards: Sequence[int], keep: int) -> Kept:
    """`dynamic_k` by the policy that training uses."""
    from sixfold.controller.oversample import DynamicK
    from sixfold.types import Reward, Task, Trajectory

    choose, task = DynamicK(keep, len(decoded)), Task("group", "")
    ended: list[Trajectory] = []
    for i in sorted(range(len(decoded)), key=decoded.__getitem__):
        reward = Reward(float(rewards[i]))
        ended.append(Trajectory.one_turn(task.id, i, [0], [0], [0.0], [0], "stop", reward=reward))
        if len(ended) < keep:
            continue
        chosen = choose(task, ended)
        if chosen is not None:
            return Kept([t.sample for t in chosen], decoded[i])
    raise AssertionError("DynamicK decides once all samples have ended")


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile with linear interpolation between neighbours, as in NumPy's default.

    The value at index `floor(0.95 n)` would be the maximum for up to 20 values, so a cap there
    would change nothing.

    Args:
        values: at least one number, in any order.
        fraction: 0 (smallest) to 1 (largest).
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def stopped(decoded: list[float], rewards: Sequence[int], source: str) -> Kept:
    """Kept samples with dynamic K. Groups of less than 4 are too small to abort a quarter."""
    keep = math.ceil(FINISHED * len(decoded))
    if keep == len(decoded):
        return Kept(list(range(keep)), max(decoded))
    return (dynamic_k if source == "formula" else library_dynamic_k)(decoded, rewards, keep)


def straggler(
    *,
    k: int,
    mean: int,
    variation: float,
    cap: bool,
    early_stop: bool,
    packing: bool,
    seed: int,
    source: str,
) -> Outcome:
    """Sample the lengths of one rollout."""
    draw = random.Random(seed)
    whole = lognormal_lengths(draw, k, mean, variation)
    rewards = [draw.randrange(2) for _ in range(k)]
    decoded = whole
    if cap:
        pool = lognormal_lengths(draw, POOL, mean, variation)
        limit = percentile(pool, CAP)
        decoded = [min(length, limit) for length in decoded]
    kept = stopped(decoded, rewards, source) if early_stop else Kept(list(range(k)), max(decoded))
    trained = [decoded[i] for i in kept.samples]
    decoded = [min(length, kept.end) for length in decoded]
    longest = max(decoded)
    return Outcome(
        values={
            "rollout_tokens": longest,
            "mean_tokens": sum(decoded) / k,
            "straggler_tax": straggler_tax(decoded),
            "decode_saved": 1 - sum(decoded) / sum(whole),
            "kept_samples": len(kept.samples),
            "trainer_tokens": sum(trained) if packing else max(trained) * len(trained),
            "expected_longest": exact_longest(mean, variation=variation, samples=k),
            "longest_by_bound": expected_longest(mean, variation=variation, samples=k),
        },
        figures=(
            Bars("Decoded tokens", "tokens", [str(i) for i in range(k)], sorted(decoded)[::-1]),
        ),
        lines=("The bound mean * exp(s sqrt(2 ln K) - s^2 / 2) is above the expected longest.",),
    )


STRAGGLER = Lab(
    name="straggler",
    title="The longest sample sets the rollout time: caps, dynamic K and packing",
    about=(
        "K lengths are log-normal with a mean and a coefficient of variation c, so s ="
        " sqrt(ln(1 + c^2)). The rollout lasts as long as the longest; the straggler tax is"
        " longest / mean - 1. The cap is the interpolated 95th percentile of a pool of 2000 other"
        " lengths: a percentile of the group itself would be its maximum for K of 20 or less."
        " Dynamic K keeps the first three quarters that finish, waits until two of their binary"
        " rewards differ, and aborts the rest; with the library as source, sixfold's DynamicK"
        " decides. Packing trains on the sum of the lengths instead of K times the longest."
    ),
    controls=(
        Control(
            "k", 16, "samples that run together (K)", low=2, high=64, sweep=(2, 4, 8, 16, 32, 64)
        ),
        Control(
            "mean",
            800,
            "mean length, tokens",
            unit="tokens",
            low=128,
            high=4096,
            sweep=(128, 256, 512, 800, 1600, 4096),
        ),
        Control("variation", 1.0, "coefficient of variation", low=0.0, high=2.0, step=0.1),
        Control("cap", False, "truncate at the 95th percentile"),
        Control("early_stop", False, "dynamic K: abort the last quarter of the samples"),
        Control("packing", False, "train on packed sequences"),
        seed_control("the lengths", sweep=(0, 1, 2, 3, 4)),
        source_control("this lab's dynamic K", "the one that trains"),
    ),
    run=straggler,
    breaking=Breaking(
        breaks={"k": 64, "variation": 2.0},
        safe={"k": 64, "variation": 0.2},
        why="One sample of a heavy tail is many times as long as the mean, and all wait for it.",
        failed=lambda outcome: outcome.number("straggler_tax") > 2,
    ),
)

LABS = (STRAGGLER,)
