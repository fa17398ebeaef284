"""Top-k, top-p and min-p: which tokens of each row can be drawn, and how probable they were together. Rows may ask for different ones.

Each of the three keeps the first so many tokens by falling probability; among equally probable ones lower ids stand first. So the kept set is a
function of the row's logits and parameters alone, top-k keeps exactly k, and a tie at the edge of top-p is cut by id. The edge is found in float64.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import SamplingParams
from .asked import Asked, Limits, index

WINDOW = 1024
"""Most probable tokens that are sorted at first; more, up to the whole row, only where a kept set reaches beyond them."""


@dataclass(frozen=True)
class Truncation:
    """The rows of a batch that truncate. rows: R row numbers. kept: [R, V] bool. mass: [R] float64, probability of the kept set."""

    rows: list[int]
    kept: Tensor
    mass: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [B, V] with -inf for what was not kept. A copy."""
        if len(self.rows) == len(logits):
            return logits.masked_fill(~self.kept, -torch.inf)
        cut, rows = logits.clone(), index(self.rows, logits.device)
        cut[rows] = logits[rows].masked_fill(~self.kept, -torch.inf)
        return cut

    def sets(self) -> Iterator[tuple[int, array[int], float]]:
        """(row number, kept ids ascending, mass) of each row."""
        ids = self.kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        both = torch.stack([self.kept.sum(-1, dtype=torch.float64), self.mass])  # one copy for both
        at = 0
        for row, count, mass in zip(self.rows, *both.tolist(), strict=True):
            yield row, array("i", ids[at : at + int(count)].tobytes()), mass
            at += int(count)


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Truncation:
    """What each truncating row of logits [B, V], at their temperature, keeps: the top_k, of their renormalised distribution the smallest set that
    reaches top_p, and of that what is at least min_p times as probable as the best. The best is always kept."""
    rows, asked = (params if isinstance(params, Asked) else Asked(params)).truncating
    vocabulary = logits.shape[-1]
    probs = (logits if len(rows) == len(logits) else logits[index(rows, logits.device)]).softmax(-1, dtype=torch.float64)
    limits = asked.limits(vocabulary, logits.device)
    last, count = _edge(probs, limits)
    # By the last one's probability and not by its place in the sorted row: the order of equals is the sort's own business.
    better, level = probs > last, probs == last
    kept = better | (level & (level.cumsum(-1) <= count - better.sum(-1, keepdim=True)))
    return Truncation(rows, kept, torch.where(kept, probs, 0.0).sum(-1))


def _edge(probs: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Probability of the last kept token of each row, and how many are kept; [R, 1] each."""
    vocabulary = probs.shape[-1]
    width = min(vocabulary, max(WINDOW, limits.largest_k))
    while True:
        best = probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
        count = _count(best, limits, vocabulary)
        if width == vocabulary or not bool(((count == width) & (count < limits.top_k)).any()):
            return best.gather(-1, count - 1), count
        width = min(vocabulary, 16 * width)


def _count(best: Tensor, limits: Limits, vocabulary: int) -> Tensor:
    """How many of the most probable, best [R, W] in falling order, are kept; [R, 1]. W where it may be more."""
    total = best.cumsum(-1)
    before = total.roll(1, -1)  # mass of the better ones
    before[:, 0] = 0.0
    top_k, top_p = limits.top_k, limits.top_p
    whole = torch.where(top_k < vocabulary, total.gather(-1, top_k.clamp_max(best.shape[-1]) - 1), 1.0)
    # Off is no limit at all: the running sum of a whole row may round to 1 before its end.
    reach = torch.where(top_p < 1.0, top_p * whole, torch.inf)
    rank = torch.arange(best.shape[-1], device=best.device)
    kept = (rank < top_k) & (before < reach) & (best >= limits.min_p * best[:, :1]) & (best > 0.0)
    return kept.sum(-1, keepdim=True).clamp_min(1)
