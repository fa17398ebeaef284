"""What a loss needs of a whole step: computed once, before its rows are split over micro-batches.

All sums are over the rows of the step, on all ranks. Nothing has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .losses import compared, log_ratios, margin
from .pairs import Pairs, Statistics, Unpaired

if TYPE_CHECKING:
    from .loss import PreferenceLoss, Settings


@torch.no_grad()
def whole_batch(
    row: PreferenceLoss, rows: Pairs | Unpaired, settings: Settings, running: float | None
) -> Statistics:
    """Statistics of a step: see `PreferenceLoss.whole_batch`."""
    if isinstance(rows, Unpaired):
        found = UNPAIRED[row.statistics] if row.statistics else _nothing
        return found(rows, settings, running)
    pairs = compared(row, rows, settings)
    statistics = (PAIRED[row.statistics] if row.statistics else _nothing)(pairs, settings, running)
    if settings.sft_weight:
        tokens = mean(rows.chosen_tokens.to(rows.chosen.dtype), rows.weights)
        statistics = replace(statistics, mean_tokens=tokens)
    return statistics


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of [N] values: a scalar."""
    return (values * weights).sum() / weights.sum()


def _nothing(rows: Pairs | Unpaired, s: Settings, running: float | None) -> Statistics:
    return Statistics()


def adaptive_beta(pairs: Pairs, s: Settings, running: float | None) -> Statistics:
    """Beta of the step and the pairs that are kept: beta-DPO, arXiv:2407.08639 eq. 8 to 10.

    M_i is beta times the margin, M0 its running average over the steps. The kept pairs are those
    with M_i nearest to M0; the paper draws them with a Gaussian probability around M0. Beta stays
    positive.
    """
    scaled, before, weights = s.beta * margin(pairs, s), running or 0.0, pairs.weights
    kept = math.ceil(s.kept * int((weights > 0).sum()) - 1e-9)
    distance = (scaled - before).abs().masked_fill(weights <= 0, math.inf)
    factor = (_ranks(distance) < kept).to(scaled.dtype)
    average = mean(scaled, weights)
    return Statistics(
        beta=(s.beta * (1 + s.adaptation * (average - before))).clamp(min=1e-3 * s.beta),
        factor=factor * weights.sum() / (weights * factor).sum(),
        running=s.momentum * before + (1 - s.momentum) * float(average),
    )


def sorted_pairs(pairs: Pairs, s: Settings, running: float | None) -> Statistics:
    """For each pair, the reference's difference of the rank of the policy's: AOT."""
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return Statistics(chosen_partner=_partner(policy, reference, pairs.weights))


def sorted_sides(pairs: Pairs, s: Settings, running: float | None) -> Statistics:
    """For each completion, the log-ratio of the same rank on the other side: unpaired AOT."""
    chosen, rejected = log_ratios(pairs)
    return Statistics(
        chosen_partner=_partner(chosen, rejected, pairs.weights),
        rejected_partner=_partner(rejected, chosen, pairs.weights),
    )


def _partner(values: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """[N] the value of `others` of each value's rank, among rows with a weight above 0."""
    absent = weights <= 0
    ordered = others.masked_fill(absent, math.inf).sort().values
    partner = ordered[_ranks(values.masked_fill(absent, math.inf))]
    return torch.where(absent, values, partner)


def _ranks(values: Tensor) -> Tensor:
    """[N] position of each value in sorted order; equal values keep their order."""
    return values.argsort(stable=True).argsort(stable=True)


def reference_point(rows: Unpaired, s: Settings, running: float | None) -> Statistics:
    """KTO's z0: mean log-ratio of mismatched completions, at least 0 (arXiv:2402.01306 eq. 8)."""
    own = rows.logp - rows.ref_logp
    ratios = own if rows.mismatched is None else rows.mismatched
    return Statistics(reference_point=mean(ratios, rows.weights).clamp(min=0))


def reward_shift(rows: Unpaired, s: Settings, running: float | None) -> Statistics:
    """BCO's delta: running mean of the rewards of both labels (arXiv:2404.04656 eq. 12)."""
    rewards = s.beta * (rows.logp - rows.ref_logp)
    sides = [rows.weights * side for side in (rows.liked, ~rows.liked)]
    means = [mean(rewards, weights) for weights in sides if weights.any()]
    now = torch.stack(means).mean()
    delta = now if running is None else s.momentum * running + (1 - s.momentum) * now
    return Statistics(reference_point=delta, running=float(delta))


PAIRED: dict[str, Callable[[Pairs, Settings, float | None], Statistics]] = {
    "adaptive beta": adaptive_beta,
    "sorted pairs": sorted_pairs,
    "sorted sides": sorted_sides,
}
UNPAIRED: dict[str, Callable[[Unpaired, Settings, float | None], Statistics]] = {
    "reference point": reference_point,
    "reward shift": reward_shift,
}
