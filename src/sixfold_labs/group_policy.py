"""GRPO on one probability: group size, KL weight and dead groups."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sixfold.environment.pass_rate import degenerate_probability
from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome, Table

from .controls import SOURCE, seed_control
from .group_advantages import Advantages, degenerate, functions, zscore

REFERENCE = 0.2
"""Probability of a correct answer under the reference policy, and at the start."""
ETA = 0.18
LEAST, MOST = 0.01, 0.99
RECENT = 100


def update(
    p: float, rewards: Sequence[float], beta: float, advantages: Advantages = zscore
) -> float:
    """p + eta * mean(A * r) - eta * beta * (p - p_ref), in [0.01, 0.99]. A dead group is skipped.

    Args:
        p: probability of a correct answer.
        rewards: 0 or 1 per sample of the group.
        beta: KL weight.
    """
    if degenerate(rewards):
        return p
    gain = sum(a * r for a, r in zip(advantages(rewards), rewards, strict=True)) / len(rewards)
    return min(MOST, max(LEAST, p + ETA * gain - ETA * beta * (p - REFERENCE)))


def kl(p: float) -> float:
    """Distance to the reference: 10 (p - p_ref)^2."""
    return 10 * (p - REFERENCE) ** 2


def group_policy(*, k: int, beta: float, steps: int, seed: int, source: str) -> Outcome:
    """Train the probability of a correct answer by GRPO."""
    draw = random.Random(seed)
    _, advantages, _ = functions(source)
    p = average = REFERENCE
    dead: list[bool] = []
    expected = 0.0
    curves: list[list[tuple[float, float | None]]] = [[], [], []]
    rewards: list[float] = []
    for step in range(1, steps + 1):
        rewards = [float(draw.random() < p) for _ in range(k)]
        dead.append(degenerate(rewards))
        expected += degenerate_probability(p, k) / steps
        p = update(p, rewards, beta, advantages)
        average = 0.92 * average + 0.08 * sum(rewards) / k
        for curve, y in zip(curves, (p, average, kl(p)), strict=True):
            curve.append((step, y))
    last = advantages(rewards)
    recent = dead[-RECENT:]
    labels = ("p(correct)", "reward average", "KL")
    return Outcome(
        values={
            "p_correct": p,
            "reward_average": average,
            "dead_group_rate": sum(dead) / steps,
            "expected_dead_group_rate": expected,
            "recent_dead_group_rate": sum(recent) / len(recent),
            "kl": kl(p),
            "last_rewards": rewards,
            "last_advantages": last,
        },
        tables=(
            Table(
                "Last group",
                ("sample", "reward", "advantage"),
                [[i, r, a] for i, (r, a) in enumerate(zip(rewards, last, strict=True))],
            ),
        ),
        figures=(
            Chart(
                "Training",
                "step",
                "share, reward or nats",
                tuple(Curve(label, c) for label, c in zip(labels, curves, strict=True)),
            ),
        ),
    )


GROUP_POLICY = Lab(
    name="group-policy",
    title="GRPO on one probability: small groups often have no gradient; a KL weight limits drift",
    about=(
        "A policy answers correctly with probability p, 0.2 at the start and in the reference."
        " Every step samples K answers, skips the group if all rewards are equal, and adds"
        " 0.18 * mean(A * r) - 0.18 * beta * (p - 0.2) to p, with A = (r - mean) / (std + 1e-6)"
        " (population). p stays in [0.01, 0.99]. The KL is modelled as 10 (p - 0.2)^2. Reward"
        " average: 0.92 * average + 0.08 * mean. At a probability p, a group is dead with"
        " probability p^K + (1 - p)^K, whose mean over the steps is the expected rate."
        " Shao et al. (2024), GRPO."
    ),
    controls=(
        Control("k", 4, "samples per group (K)", low=2, high=8),
        Control("beta", 0.05, "KL weight", low=0.0, high=0.5, step=0.05),
        Control("steps", 400, "number of groups", low=1, high=2000, step=100),
        seed_control("the samples", sweep=(0, 1, 2, 3)),
        SOURCE,
    ),
    run=group_policy,
    breaking=Breaking(
        breaks={"k": 2, "beta": 0.0},
        safe={"k": 8, "beta": 0.5},
        why="Nothing holds p back, and once p is near 1 nearly every group is dead.",
        failed=lambda outcome: outcome.number("recent_dead_group_rate") > 0.9,
    ),
    most_outcomes=400,
)

LABS = (GROUP_POLICY,)
