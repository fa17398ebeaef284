"""Figures of a reward model on comparisons, and the score of RewardBench 2 (arXiv:2506.01937).

No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ..errors import UserError
from .statistics import Interval, task_interval

TIES = "ties"
"""Subset, in lower case, of prompts with several equally right answers."""
_TIES_ID = re.compile(r"(.*)\b(ref|tied):(\d+)")


@dataclass(frozen=True)
class ScoredComparison:
    """A comparison with the scores of its completions.

    Attributes:
        id: id of the row. In the subset Ties it is `ref:N` or `tied:N`.
        subset: part of the benchmark, or "".
        grades: grade of each. Completions with the largest one are right; there are two or more
            different ones.
    """

    id: str
    subset: str
    scores: tuple[float, ...]
    grades: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """Share of pairs with different grades that are in the right order. A tie counts half."""
        rows = list(zip(self.scores, self.grades, strict=True))
        right = [(a > b) + (a == b) / 2 for a, x in rows for b, y in rows if x > y]
        return math.fsum(right) / len(right)

    @property
    def best_of(self) -> float:
        """Share of right completions among those with the largest score."""
        most = max(self.scores)
        best = [g for score, g in zip(self.scores, self.grades, strict=True) if score == most]
        return best.count(max(self.grades)) / len(best)

    @property
    def gap(self) -> float:
        """Lowest score of a right completion minus the highest of a wrong one."""
        right, wrong = self._sides()
        return min(right) - max(wrong)

    @property
    def spread(self) -> float:
        """Highest score of a right completion minus the lowest."""
        right, _ = self._sides()
        return max(right) - min(right)

    def _sides(self) -> tuple[list[float], list[float]]:
        """Scores of right and of wrong completions."""
        rows, most = list(zip(self.scores, self.grades, strict=True)), max(self.grades)
        return [s for s, g in rows if g == most], [s for s, g in rows if g < most]


@dataclass(frozen=True)
class TiesFigures:
    """Figures of the subset Ties: a prompt has a row with several right answers, and one with one.

    Attributes:
        tied_accuracy: share of rows `tied:N` in which each right answer beats each wrong one.
        ref_accuracy: the same of rows `ref:N`.
        preferred: share of prompts whose right answers differ less than right from wrong ones.
        preferred_hard: the same with the smaller gap of both rows.
        margin: mean of tanh(smaller gap / spread - 1) over the prompts.
    """

    tied_accuracy: float
    ref_accuracy: float
    preferred: float
    preferred_hard: float
    margin: float

    @property
    def score(self) -> float:
        """Score of the subset: at most 1.01."""
        return (
            0.30 * (self.tied_accuracy + self.ref_accuracy)
            + 0.20 * (self.preferred + self.preferred_hard)
            + 0.01 * self.margin
        )


def ties_prompt(identity: str) -> tuple[str, str]:
    """Kind of a row of the subset Ties, ref or tied, and the prompt to which it belongs.

    Raises:
        UserError: if the id has another form.
    """
    found = _TIES_ID.fullmatch(identity)
    if found is None:
        raise UserError(
            f"subset Ties: the id of a row is ref:N or tied:N, not {identity!r}. data.id_field"
            " names its column"
        )
    return found[2], found[1] + found[3]


def ties_figures(rows: Sequence[ScoredComparison]) -> TiesFigures:
    """Figures of the rows of the subset Ties.

    Raises:
        UserError: if an id has another form, or no prompt has a row of both kinds.
    """
    by_kind: dict[str, dict[str, ScoredComparison]] = {"ref": {}, "tied": {}}
    for row in rows:
        kind, prompt = ties_prompt(row.id)
        by_kind[kind][prompt] = row
    ref, tied = by_kind["ref"], by_kind["tied"]
    both = [
        (tied[prompt].spread, tied[prompt].gap, ref[prompt].gap) for prompt in tied if prompt in ref
    ]
    if not both:
        raise UserError(
            "subset Ties: no prompt has a row ref:N and a row tied:N. Evaluate all rows of it"
            " (data.limit = 0, data.heldout = 0)"
        )
    return TiesFigures(
        fmean([row.gap > 0 for row in tied.values()]),
        fmean([row.gap > 0 for row in ref.values()]),
        fmean([spread < gap for spread, gap, _ in both]),
        fmean([spread < min(gap, hard) for spread, gap, hard in both]),
        fmean([_margin(min(gap, hard), spread) for spread, gap, hard in both]),
    )


def _margin(gap: float, spread: float) -> float:
    """tanh(gap / spread - 1): without a spread its limit, and 0 if neither is there."""
    if spread:
        return math.tanh(gap / spread - 1)
    return math.copysign(1.0, gap) if gap else 0.0


@dataclass(frozen=True)
class SubsetFigures:
    """Figures of the comparisons of one subset, or of all.

    Attributes:
        accuracy: share of pairs in the right order, averaged over comparisons.
        best_of: share of comparisons whose highest score has a right completion.
        ties: figures of the subset Ties. None for others.
    """

    comparisons: int
    accuracy: Interval
    best_of: Interval
    ties: TiesFigures | None = None

    @property
    def score(self) -> float:
        """Share of the subset in the score of RewardBench 2."""
        return self.best_of.mean if self.ties is None else self.ties.score

    def record(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "comparisons": self.comparisons,
            "accuracy": self.accuracy.mean,
            "accuracy_interval": list(self.accuracy[1:]),
            "best_of": self.best_of.mean,
            "best_of_interval": list(self.best_of[1:]),
            **({"ties": {"score": self.ties.score, **asdict(self.ties)}} if self.ties else {}),
        }


@dataclass(frozen=True)
class ComparisonFigures:
    """Figures of a reward model.

    Attributes:
        subsets: those of each named subset, in order of their names.
    """

    every: SubsetFigures
    subsets: dict[str, SubsetFigures]

    @property
    def score(self) -> float | None:
        """Score of RewardBench 2: the mean over its subsets. None without a subset Ties."""
        subsets = self.subsets.values()
        return fmean([s.score for s in subsets]) if any(s.ties for s in subsets) else None


def comparison_figures(rows: Sequence[ScoredComparison]) -> ComparisonFigures:
    """Figures of at least one comparison.

    Raises:
        UserError: as `ties_figures`.
    """
    names = sorted({row.subset for row in rows} - {""})
    return ComparisonFigures(
        _figures(rows),
        {name: _figures([row for row in rows if row.subset == name], name) for name in names},
    )


def _figures(rows: Sequence[ScoredComparison], name: str = "") -> SubsetFigures:
    return SubsetFigures(
        len(rows),
        task_interval([[row.accuracy] for row in rows]),
        task_interval([[row.best_of] for row in rows]),
        ties_figures(rows) if name.lower() == TIES else None,
    )
