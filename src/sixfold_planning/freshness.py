"""Cost of stale weights: clip fraction against staleness, and idle time that async removes."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY = 20.0
"""Weight versions after which `1 - 1/e` of the ratios are clipped, in the model below."""


def clip_fraction(staleness: float) -> float:
    """Share of clipped tokens at a staleness in weight versions: `1 - exp(-staleness / 20)`.

    A rule of thumb. A real run measures its clip fraction.
    """
    return 1 - math.exp(-staleness / DECAY)


def largest_staleness(clip_budget: float) -> int:
    """Largest whole staleness whose clip fraction stays within a budget below 1."""
    # Rounding of the logarithm must not lose a version that meets the budget exactly.
    return math.floor(-DECAY * math.log1p(-clip_budget) + 1e-9)


@dataclass(frozen=True)
class ClipBands:
    """Limits of the share of clipped tokens.

    Attributes:
        healthy: below this share, on-policy training is healthy.
        usable: below this share, async training with clipping is stable.
        broken: at and above this share, samples are too stale.
    """

    healthy: float
    usable: float
    broken: float


BANDS = {
    "async": ClipBands(healthy=0.05, usable=0.15, broken=0.25),
    "sync-interval": ClipBands(healthy=0.26, usable=0.26, broken=0.30),
    "diagnosis": ClipBands(healthy=0.30, usable=0.30, broken=0.30),
}
"""Limits that were published for async training, for long sync intervals and for diagnosis.

They disagree, so the caller chooses. Compare like with like: the share of ratios outside the clip
range is larger than the share of clipped gradients, because the sign of the advantage matters too.
"""


def clip_verdict(share: float, bands: ClipBands) -> str:
    """Verdict on a share of clipped tokens: "healthy", "usable", "doubtful" or "broken".

    Args:
        share: measured or modelled share, 0 to 1.
        bands: limits, such as `BANDS["async"]`.
    """
    if share >= bands.broken:
        return "broken"
    if share < bands.healthy:
        return "healthy"
    return "usable" if share < bands.usable else "doubtful"


def idle_band(*, rollout: float, trainer: float, sync: float) -> float:
    """Seconds per step in which one of two pools waits: `|rollout - trainer| + sync`.

    This is the most that async training can remove from a disaggregated step.
    """
    return abs(rollout - trainer) + sync


def replay_weight(staleness: float, gamma: float) -> float:
    """Relative probability of drawing a stale sample from a replay buffer: `gamma^staleness`.

    The decay `gamma` per weight version is about 0.95.
    """
    return gamma**staleness
