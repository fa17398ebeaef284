"""Figures of a process reward model on labelled solutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

THRESHOLD = 0.5
"""A step with a smaller score, or with a smaller label, is wrong."""
UNLABELLED = -1.0
"""In place of the label of a step without one."""
_BINS = 10


@dataclass(frozen=True)
class StepQuality:
    """How well scores of steps agree with labels.

    The last three are ProcessBench's (arXiv:2412.06559), which measures solutions by their first
    wrong step. Solutions with an unlabelled step before it do not count. NaN without solutions.

    Attributes:
        accuracy: share of steps on the right side of `THRESHOLD`.
        calibration_error: mean difference of score and label, over ten bins of the score.
        error_found: share of the solutions with an error whose first wrong step is the first with a
            score below the threshold.
        all_right: share of the right solutions without such a score.
        first_error_f1: harmonic mean of the two.
    """

    accuracy: float
    calibration_error: float
    error_found: float
    all_right: float
    first_error_f1: float


def step_quality(scores: Sequence[Tensor], labels: Sequence[Tensor]) -> StepQuality:
    """Figures of solutions.

    Args:
        scores: scores between 0 and 1 of all steps of each solution, in order.
        labels: label of each step, or `UNLABELLED`.
    """
    every, truth = torch.cat(list(scores)), torch.cat(list(labels))
    every, truth = every[truth != UNLABELLED], truth[truth != UNLABELLED]
    agree = (every >= THRESHOLD) == (truth >= THRESHOLD)
    place = (every * _BINS).long().clamp_max(_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=every.dtype).index_add(0, place, every - truth)
    found = first_errors(scores, labels)
    wrong = [true == seen for true, seen in found if true >= 0]
    right = [true == seen for true, seen in found if true < 0]
    error_found, all_right = _mean(wrong), _mean(right)
    both = error_found + all_right
    f1 = 2 * error_found * all_right / both if both != 0 else 0.0
    return StepQuality(
        float(agree.double().mean()),
        float(gaps.abs().sum() / len(every)),
        error_found,
        all_right,
        f1,
    )


def first_errors(scores: Sequence[Tensor], labels: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Number of the first wrong step of each solution by labels and by scores. -1: none is wrong.

    Solutions with an unlabelled step before their first error are left out. The arguments are those
    of `step_quality`.
    """
    return [
        (_first_error(label), _first_error(score))
        for score, label in zip(scores, labels, strict=True)
        if not _gap(label)
    ]


def _first_error(values: Tensor) -> int:
    """Number of the first value below the threshold. -1 if there is none."""
    below = (values < THRESHOLD).nonzero()
    return int(below[0]) if len(below) else -1


def _gap(labels: Tensor) -> bool:
    """True if the first step that is not right has no label, so the first error is unknown."""
    first = _first_error(labels)
    return first >= 0 and float(labels[first]) == UNLABELLED


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
