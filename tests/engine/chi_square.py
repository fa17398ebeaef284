"""Pearson's chi-square test of counts."""

from __future__ import annotations

import numpy as np
import torch


def p_value(statistic: float, degrees: int) -> float:
    """Of a chi-square statistic."""
    return float(
        torch.special.gammaincc(
            torch.tensor(degrees / 2, dtype=torch.float64),
            torch.tensor(statistic / 2, dtype=torch.float64),
        )
    )


def fits(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value that counts [..., V] were drawn from probs [..., V], each row from its own
    distribution; 0 where the impossible was drawn.
    """
    expected = counts.sum(-1, keepdims=True) * probs
    if counts[probs == 0].any():
        return 0.0
    likely = expected >= 5
    rare = np.where(likely, 0, expected).sum(), np.where(likely, 0, counts).sum()
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    degrees = int(likely.sum()) - int((counts.sum(-1) > 0).sum())
    if rare[0] >= 5:
        statistic, degrees = statistic + (rare[1] - rare[0]) ** 2 / rare[0], degrees + 1
    return p_value(statistic, degrees)


def agree(first: np.ndarray, second: np.ndarray) -> float:
    """p-value that two samples' counts [V] are of one distribution."""
    both = first + second
    likely = both >= 10
    rows = [np.append(side[likely], side[~likely].sum()).astype(float) for side in (first, second)]
    total = rows[0] + rows[1]
    rows, total = [row[total > 0] for row in rows], total[total > 0]
    expected = [total * row.sum() / total.sum() for row in rows]
    return p_value(
        sum(((row - e) ** 2 / e).sum() for row, e in zip(rows, expected, strict=True)),
        len(total) - 1,
    )
