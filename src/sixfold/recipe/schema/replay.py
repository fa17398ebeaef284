"""Settings of the replay buffer."""

from __future__ import annotations

from .base import Real, Section, knob


class ReplayConfig(Section):
    """Groups that are trained again in later steps, from a buffer of trained groups."""

    share: Real = knob(
        0.0,
        "share of a step's groups that were trained before, in addition to the"
        " rollout.prompts_per_step new ones; needs algorithm.correction (0: no buffer)",
        ge=0,
        le=0.5,
    )
    max_age: int = knob(
        1,
        "steps for which a group stays in the buffer; the importance weights of older samples say"
        " little, so 1 or 2 are usual",
        ge=1,
        le=4,
    )
    gamma: Real = knob(
        0.5, "a group that was new a steps ago is drawn with weight gamma^a", gt=0, le=1
    )
    capacity: int = knob(
        0, "groups that the buffer holds; the oldest leave first (0: all of max_age steps)", ge=0
    )
    max_ratio: Real = knob(
        2.0,
        "a group leaves the buffer when the mean ratio of its tokens, trainer to sampler, exceeds"
        " this",
        gt=1,
    )
