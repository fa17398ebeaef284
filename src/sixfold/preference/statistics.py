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

from .losses import log_ratios, margin, without_tail
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
    pairs = without_tail(rows if row.needs_reference else rows.without_reference(), settings)
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
    with M_i nearest to M0; the paper draws them with a Gaussian probability around M0.
    """
    scaled, before = s.beta * margin(pairs, s), running or 0.0
    kept = max(1, math.ceil(s.kept * len(pairs) - 1e-9))
    factor = torch.zeros_like(scaled)
    factor[(scaled - before).abs().argsort(stable=True)[:kept]] = 1.0
    factor *= pairs.weights.sum() / (pairs.weights * factor).sum()
    average = mean(scaled, pairs.weights)
    return Statistics(
        beta=(s.beta * (1 + s.adaptation * (average - before))).clamp(min=1e-3 * s.beta),
        factor=factor,
        running=s.momentum * before + (1 - s.momentum) * float(average),
    )


def sorted_pairs(pairs: Pairs, s: Settings, running: float | None) -> Statistics:
    """For each pair, the reference's difference of the rank of the policy's: AOT."""
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    policy = pairs.chosen - pairs.rejected
    reference = pairs.ref_chosen - pairs.ref_rejected
    return Statistics(chosen_partner=reference.sort().values[_ranks(policy)])


def sorted_sides(pairs: Pairs, s: Settings, running: float | None) -> Statistics:
    """For each completion, the log-ratio of the same rank on the other side: unpaired AOT."""
    chosen, rejected = log_ratios(pairs)
    return Statistics(
        chosen_partner=rejected.sort().values[_ranks(chosen)],
        rejected_partner=chosen.sort().values[_ranks(rejected)],
    )


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
    sides = [
        mean(rewards[side], rows.weights[side]) for side in (rows.liked, ~rows.liked) if side.any()
    ]
    now = torch.stack(sides).mean()
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
