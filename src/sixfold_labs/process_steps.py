"""The chains of the lab `process-reward`: their steps, and the noise of their rewards."""

from __future__ import annotations

import math
import random

STEPS = 6
OUTCOME_NOISE = 0.10
PROCESS_NOISE = 0.15


def noisy(draw: random.Random, label: bool, error: float) -> bool:
    """The label, flipped with probability `error`."""
    return label != (draw.random() < error)


def continuations(n: int, beam: int) -> int:
    """Continuations per beam and step: ceil(N / (beam * steps)).

    N chains have N * 6 steps, but the rule divides N alone by the number of steps. With 16 chains
    and 4 beams one continuation is left, and the beam cannot choose.
    """
    return math.ceil(n / (beam * STEPS))
