"""Truncation by top-k, top-p and min-p: the tokens of each row that can be drawn, and their total
mass.

Each rule keeps a number of tokens in order of decreasing probability. Equally probable tokens are
ordered by id. So the kept set depends only on the row's logits and parameters: top-k keeps exactly
k tokens, and ties at the edge of top-p are broken by id. The edge is computed in float64. Rows may
have different parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import SamplingParams
from .sampling_batch import Limits, SamplingBatch, index

WINDOW = 1024
"""Number of most probable tokens sorted at first. More are sorted, up to the whole row, only if a
kept set reaches beyond them."""


@dataclass(frozen=True)
class Truncation:
    """Tokens kept by the rows of a batch that truncate.

    Attributes:
        rows: R row numbers.
        kept: [R, V] bool, True for kept tokens.
        mass: [R] float64, total probability of the kept tokens.
    """

    rows: list[int]
    kept: Tensor
    mass: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Copy of logits [B, V] with -inf for tokens that were not kept."""
        if len(self.rows) == len(logits):
            return logits.masked_fill(~self.kept, -torch.inf)
        cut, rows = logits.clone(), index(self.rows, logits.device)
        cut[rows] = logits[rows].masked_fill(~self.kept, -torch.inf)
        return cut

    def sets(self) -> Iterator[tuple[int, array[int], float]]:
        """Yield (row number, kept ids in ascending order, mass) of each row."""
        ids = self.kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        # One tensor for both, so that the host waits for one copy only.
        both = torch.stack([self.kept.sum(-1, dtype=torch.float64), self.mass])
        at = 0
        for row, count, mass in zip(self.rows, *both.tolist(), strict=True):
            yield row, array("i", ids[at : at + int(count)].tobytes()), mass
            at += int(count)


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Truncation:
    """Truncate the rows that request it: first top_k, then top_p, then min_p.

    top_p keeps the smallest set that reaches this mass, after top_k and renormalisation. min_p
    keeps the tokens that are at least min_p times as probable as the best. The best token is always
    kept.

    Args:
        logits: [B, V], already divided by the temperature.

    Returns:
        The kept tokens of the rows that truncate.
    """
    rows, batch = (
        params if isinstance(params, SamplingBatch) else SamplingBatch(params)
    ).truncating
    vocabulary = logits.shape[-1]
    probs = (logits if len(rows) == len(logits) else logits[index(rows, logits.device)]).softmax(
        -1, dtype=torch.float64
    )
    limits = batch.limits(vocabulary, logits.device)
    last, count = _edge(probs, limits)
    # Compare with the last kept probability, not with sorted indices: ties are in any order there.
    better, level = probs > last, probs == last
    kept = better | (level & (level.cumsum(-1) <= count - better.sum(-1, keepdim=True)))
    return Truncation(rows, kept, torch.where(kept, probs, 0.0).sum(-1))


def _edge(probs: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Probability of each row's last kept token [R, 1], and number of kept tokens [R, 1]."""
    vocabulary = probs.shape[-1]
    width = min(vocabulary, max(WINDOW, limits.largest_k))
    while True:
        best = (
            probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
        )
        count = _count(best, limits, vocabulary)
        if width == vocabulary or not bool(((count == width) & (count < limits.top_k)).any()):
            return best.gather(-1, count - 1), count
        width = min(vocabulary, 16 * width)


def _count(best: Tensor, limits: Limits, vocabulary: int) -> Tensor:
    """Number of kept tokens of each row [R, 1]; W if the kept set may reach beyond `best`.

    Args:
        best: [R, W] the largest probabilities in decreasing order.
    """
    total = best.cumsum(-1)
    before = total.roll(1, -1)  # mass of all more probable tokens
    before[:, 0] = 0.0
    top_k, top_p = limits.top_k, limits.top_p
    whole = torch.where(
        top_k < vocabulary, total.gather(-1, top_k.clamp_max(best.shape[-1]) - 1), 1.0
    )
    # If top_p is off, the limit is infinity, not 1: the cumulative sum may round to 1 too early.
    reach = torch.where(top_p < 1.0, top_p * whole, torch.inf)
    rank = torch.arange(best.shape[-1], device=best.device)
    kept = (rank < top_k) & (before < reach) & (best >= limits.min_p * best[:, :1]) & (best > 0.0)
    return kept.sum(-1, keepdim=True).clamp_min(1)
