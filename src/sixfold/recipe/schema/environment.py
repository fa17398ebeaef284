"""Settings of the environment."""

from __future__ import annotations

from .base import Real, Section, knob


class EnvironmentConfig(Section):
    """How answers are checked."""

    rewards: tuple[str, ...] = knob(
        ("arithmetic",),
        "arithmetic, math, reasoning_gym, reasoning_gym_solved, or path.py:function /"
        " module:function; summed",
    )
    weights: tuple[Real, ...] = knob((), "weight of each reward; empty: 1 each")
    timeout_s: Real = knob(
        5.0, "seconds one check may take before it is killed and recorded as an error", gt=0
    )
    error_budget: Real = knob(
        0.1, "share of a step's checks that may fail before the run stops", ge=0, le=1
    )
    workers: int = knob(1, "processes that check answers", ge=1, le=1024)
    preflight: int = knob(
        50,
        "rollouts checked before the first step, to say whether the tasks are too easy or too hard",
        ge=0,
    )
