"""Learning signal of a pool of prompts: p(1 - p), wasted groups, and curation."""

from __future__ import annotations

import random

from sixfold.environment.pass_rate import advantage_power, estimated_advantage_power, pool_signal
from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome

from .preferences import sigmoid

POOL = 1000
BINS = 10
GROUPS = 50
"""Random groups from which the signal of a pass rate is estimated."""


def pass_rates(policy: float) -> list[float]:
    """Pass rate of every prompt of the pool.

    Difficulty is d = 3u^2 - 2u^3 at 1000 evenly spaced u in (0, 1), and the pass rate is
    sigmoid(6 (s - d)).

    Args:
        policy: strength s of the policy, in [0, 1].
    """
    places = [(index + 0.5) / POOL for index in range(POOL)]
    return [sigmoid(6 * (policy - (3 * u**2 - 2 * u**3))) for u in places]


def curated(rates: list[float], curation: float) -> list[float]:
    """Pass rates that curation keeps: |p - 0.5| < 0.5 - 0.45 * curation.

    Args:
        curation: strength of curation, in [0, 1]. 0 keeps all.
    """
    return [p for p in rates if abs(p - 0.5) < 0.5 - 0.45 * curation]


def estimated_signal(pass_rate: float, samples: int) -> float:
    """Estimate of E[A^2] from the rewards of `GROUPS` groups, which are drawn with a fixed seed.

    Args:
        pass_rate: probability that a sample is correct.
        samples: samples per group.
    """
    draw = random.Random(0).random
    groups = [[float(draw() < pass_rate) for _ in range(samples)] for _ in range(GROUPS)]
    return estimated_advantage_power(groups)


def signal_density(*, policy: float, curation: float, k: int) -> Outcome:
    """Signal of a pool of prompts for one policy."""
    kept = curated(pass_rates(policy / 100), curation / 100)
    pool = pool_signal(kept, k)
    counts = [sum(min(int(p * BINS), BINS - 1) == b for p in kept) for b in range(BINS)]
    labels = [f"{b / BINS:.1f} to {(b + 1) / BINS:.1f}" for b in range(BINS)]
    grid = [i / 50 for i in range(51)]
    return Outcome(
        values={
            "kept_prompts": pool.prompts,
            "expected_signal": pool.signal,
            "wasted_groups": pool.wasted,
            "signal_per_100_rollouts": 100 * pool.per_sample,
            "rollouts": k * pool.prompts,
        },
        figures=(
            Bars("Pass rates of the kept prompts", "prompts", labels, [float(c) for c in counts]),
            Chart(
                "Signal",
                "pass rate p",
                "E[A^2]",
                (
                    Curve("p (1 - p)", [(p, advantage_power(p)) for p in grid]),
                    Curve(
                        f"estimated from {GROUPS} groups of {k}",
                        [(p, estimated_signal(p, k)) for p in grid],
                    ),
                ),
            ),
        ),
    )


SIGNAL_DENSITY = Lab(
    name="signal-density",
    title="Signal of a prompt pool: too easy and too hard prompts waste rollouts",
    about=(
        "1000 prompts have difficulties d = 3u^2 - 2u^3 at evenly spaced u. A policy of strength s"
        " solves a prompt with probability p = sigmoid(6 (s - d)). Curation c keeps"
        " |p - 0.5| < 0.5 - 0.45 c. For a binary reward and a group-mean baseline, E[A^2] ="
        " p (1 - p): the signal of a prompt. A group of K samples is wasted with probability"
        " p^K + (1 - p)^K, because equal rewards give no gradient."
    ),
    controls=(
        Control(
            "policy", 20, "strength of the policy, percent", unit="%", low=0, high=100, step=10
        ),
        Control("curation", 0, "strength of curation, percent", unit="%", low=0, high=100, step=10),
        Control("k", 8, "samples per prompt (K)", low=2, high=32, sweep=(2, 4, 8, 16, 32)),
    ),
    run=signal_density,
    breaking=Breaking(
        breaks={"policy": 20, "curation": 0, "k": 2},
        safe={"policy": 80, "curation": 80, "k": 8},
        why="Two samples of a prompt that is nearly always solved or failed agree.",
        failed=lambda outcome: outcome.number("wasted_groups") > 0.5,
    ),
    most_outcomes=250,
)

LABS = (SIGNAL_DENSITY,)
