"""One value from the scores of the steps of a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

Aggregate = Callable[[Sequence[float]], float]

AGGREGATES: Mapping[str, Aggregate] = {
    "min": min,
    "mean": fmean,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "sum": math.fsum,
}
"""Functions of at least one score. The minimum and the product ask that no step is wrong; the last
score alone speaks of the whole chain (Snell et al. 2024, arXiv:2408.03314, section 5.1).
"""
