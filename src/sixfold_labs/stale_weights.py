"""Rare weight syncs: the sampler falls behind, the clip fraction rises, learning stops."""

from __future__ import annotations

import math
from collections.abc import Callable

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome

from .controls import SOURCE

TARGET = 4.0
PULL = 0.04
CLIP = 0.2
HEALTHY, STALE = 0.26, 0.30
"""Shares of clipped steps up to which training is healthy, and from which weights are stale."""

Clipped = Callable[[float], bool]
"""True if the clip removes the gradient at a log-ratio."""


def outside_band(log_ratio: float) -> bool:
    """True if exp(log_ratio) is outside [1 - CLIP, 1 + CLIP]."""
    return not 1 - CLIP <= math.exp(log_ratio) <= 1 + CLIP


def clip_rule(source: str) -> Clipped:
    """`outside_band`, or the clip of the library's surrogate at advantage 1."""
    if source == "formula":
        return outside_band
    import torch

    from sixfold.algorithm.losses import clipped_surrogate

    def active(log_ratio: float) -> bool:
        logp = torch.tensor([[log_ratio]], dtype=torch.float64)
        zero, one = torch.zeros_like(logp), torch.ones_like(logp)
        return bool(clipped_surrogate(logp, zero, one, CLIP, CLIP).active)

    return active


def reward(theta: float) -> float:
    """Mean reward of a policy: sigmoid(theta - 2)."""
    return 1 / (1 + math.exp(2 - theta))


def stale_weights(*, sync_every: int, steps: int, source: str) -> Outcome:
    """Train one parameter and copy it to the sampler every `sync_every` steps."""
    clipped = clip_rule(source)
    trainer = sampler = average = last = 0.0
    lost = 0
    gaps: list[tuple[float, float | None]] = []
    rewards: list[tuple[float, float | None]] = []
    for step in range(1, steps + 1):
        if clipped(trainer - sampler):
            lost += 1
        else:
            trainer += PULL * (TARGET - trainer)
        average = 0.95 * average + 0.05 * reward(trainer)
        last = abs(trainer - sampler)
        gaps.append((step, last))
        rewards.append((step, average))
        if step % sync_every == 0:
            sampler = trainer
    share = lost / steps
    verdict = "healthy" if share <= HEALTHY else "stale" if share >= STALE else "watch"
    return Outcome(
        values={
            "frac_clipped": share,
            "reward_average": average,
            "log_ratio_after_last_sync": abs(trainer - sampler),
            "log_ratio_before_last_sync": last,
            "largest_log_ratio": max(gap or 0.0 for _, gap in gaps),
            "verdict": verdict,
        },
        figures=(
            Chart(
                "Distance of the sampler", "step", "log-ratio, nats", (Curve("log-ratio", gaps),)
            ),
            Chart("Reward", "step", "reward", (Curve("reward average", rewards),)),
        ),
        lines=(
            ("From 30 % clipped steps the weights count as stale: sync more often.",)
            if verdict == "stale"
            else ()
        ),
    )


STALE_WEIGHTS = Lab(
    name="stale-weights",
    title="Rare weight syncs: the clip fraction shows staleness before the reward does",
    about=(
        "The trainer's parameter moves by 0.04 (4 - theta) unless the ratio"
        " exp(theta - theta_sampler) is outside [0.8, 1.2]; then the step is clipped. The reward is"
        " sigmoid(theta - 2), averaged with 0.95 and 0.05. Every n steps the sampler receives"
        " theta. A clip fraction up to 26 % is healthy; from 30 % the weights are stale. The"
        " log-ratio is given before and after the last sync: after it, it is 0 whenever n divides"
        " the number of steps. With the library as source, sixfold's clipped surrogate at advantage"
        " 1 decides whether a step is clipped."
    ),
    controls=(
        Control("sync_every", 1, "steps between weight syncs", low=1, high=40),
        Control("steps", 200, "number of training steps", low=1, high=1000),
        SOURCE,
    ),
    run=stale_weights,
    breaking=Breaking(
        breaks={"sync_every": 20},
        safe={"sync_every": 2},
        why="Between two syncs the policy leaves the clip band, and then gets no gradient.",
        failed=lambda outcome: outcome.values["verdict"] == "stale",
    ),
)

LABS = (STALE_WEIGHTS,)
