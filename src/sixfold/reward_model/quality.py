"""Figures of a reward model on held-out comparisons or labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..evaluation.statistics import Interval, bounded_interval
from ..types import DELTA_EDGES

HEALTHY = (0.5, 4.0)
"""|delta| of a pair below the band hardly tells its completions apart; above it, the model is surer
than comparisons of people allow.
"""


@dataclass(frozen=True)
class Quality:
    """How well scores agree with comparisons.

    Attributes:
        accuracy: share of pairs in the right order, averaged over groups, with its 95 % interval. A
            tie counts half.
        histogram: pairs in each bin of |delta|.
        healthy: share of pairs with |delta| in `HEALTHY`.
        calibration_error: mean difference, over the bins, of sigma(|delta|) and the share of pairs
            in the right order.
    """

    accuracy: Interval
    histogram: list[float]
    healthy: float
    calibration_error: float


def quality(delta: Tensor, groups: Tensor) -> Quality:
    """Figures from differences of scores, of which a perfect model has positive ones only.

    Args:
        delta: [N], N >= 1. Of a pair, the score of the better completion minus that of the worse;
            of a labelled completion, its score, or minus it if it is labelled wrong.
        groups: [N] number of each difference's comparison, from 0.
    """
    delta = delta.double().cpu()
    size, right = delta.abs(), torch.heaviside(delta, torch.tensor(0.5, dtype=torch.float64))
    bin_of = torch.bucketize(size, torch.tensor(DELTA_EDGES, dtype=torch.float64), right=True)
    error = 0.0
    for one in bin_of.unique():
        inside = bin_of == one
        gap = torch.sigmoid(size[inside]).mean() - right[inside].mean()
        error += float(inside.double().mean() * gap.abs())
    counts = torch.bincount(groups)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add(0, groups, right)
    return Quality(
        bounded_interval((sums[counts > 0] / counts[counts > 0]).tolist()),
        torch.bincount(bin_of, minlength=len(DELTA_EDGES) + 1).double().tolist(),
        float(((size >= HEALTHY[0]) & (size <= HEALTHY[1])).double().mean()),
        error,
    )


def within_groups(values: Tensor, groups: Tensor) -> Tensor:
    """Differences from the mean of each group, or from the mean of all if every group is of one.

    Args:
        values: [B] float64.
        groups: [B] number of each value's group, from 0.
    """
    counts = torch.bincount(groups)
    if int(counts.max()) == 1:
        return values - values.mean()
    sums = torch.zeros(len(counts), dtype=values.dtype).index_add(0, groups, values)
    return values - (sums / counts.clamp_min(1))[groups]


def length_correlation(scores: Tensor, lengths: Tensor, groups: Tensor) -> float:
    """Correlation of score and length among completions of one prompt. 0 if one is constant.

    Args:
        scores: [B] float64.
        lengths: [B] tokens of each completion, float64.
        groups: [B] number of each completion's group, from 0.
    """
    r, n = within_groups(scores, groups), within_groups(lengths, groups)
    scale = (r.square().sum() * n.square().sum()).sqrt()
    return float((r * n).sum() / scale) if float(scale) > 1e-12 else 0.0


def length_slope(scores: Tensor, lengths: Tensor, groups: Tensor) -> float:
    """Score per token of length: least squares within groups. 0 if all lengths are equal.

    Without `slope * length`, `length_correlation` is 0. Arguments as there.
    """
    r, n = within_groups(scores, groups), within_groups(lengths, groups)
    square = n.square().sum()
    return float((r * n).sum() / square) if float(square) > 0 else 0.0
