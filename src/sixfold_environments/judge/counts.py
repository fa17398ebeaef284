"""Counts of a judge, which can be summed over ranks, and the metrics `judge/*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import sqrt

from .spending import Cost


@dataclass
class Moments:
    """Sums over pairs of values, for their correlation.

    Attributes:
        n: number of pairs.
        x: sum of the first values.
        xx: sum of squares of the first values.
        yy: sum of squares of the second values.
    """

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.yy += y * y
        self.xy += x * y

    @property
    def correlation(self) -> float | None:
        """Pearson's r. None for fewer than 3 pairs, or if one of the values is constant."""
        if self.n < 3:
            return None
        vx = self.xx / self.n - (self.x / self.n) ** 2
        vy = self.yy / self.n - (self.y / self.n) ** 2
        if vx <= 1e-12 * max(1.0, self.xx / self.n) or vy <= 1e-12:
            return None
        return (self.xy / self.n - self.x * self.y / self.n**2) / sqrt(vx * vy)


@dataclass
class Counts:
    """Counts of one process since the last `Judge.take`.

    Attributes:
        asked: questions, including cached ones.
        cached: questions with a stored answer, or equal to a question in progress.
        calls: answered requests.
        prompt_tokens: prompt tokens of these requests.
        completion_tokens: reply tokens of these requests.
        usd: price of these requests, in US dollars.
        repeated: requests that were sent again after a failure of the endpoint.
        unreadable: replies without a readable verdict.
        failed: questions without a verdict.
        judged: completions given to a judge reward, including refused ones.
        refused: completions that were refused without asking the judge.
        first: comparisons won by the completion that was shown first.
        second: comparisons won by the completion that was shown second.
        pairs: pairs that were compared in both orders.
        unstable: such pairs whose verdict changed with the order.
        usd_total: price of the whole run, in US dollars.
        calls_total: answered requests of the whole run.
    """

    asked: float = 0
    cached: float = 0
    calls: float = 0
    prompt_tokens: float = 0
    completion_tokens: float = 0
    usd: float = 0
    repeated: float = 0
    unreadable: float = 0
    failed: float = 0
    judged: float = 0
    refused: float = 0
    first: float = 0
    second: float = 0
    pairs: float = 0
    unstable: float = 0
    usd_total: float = 0
    calls_total: float = 0

    def pay(self, cost: Cost) -> None:
        self.calls += cost.calls
        self.prompt_tokens += cost.prompt_tokens
        self.completion_tokens += cost.completion_tokens
        self.usd += cost.usd


@dataclass
class Meter:
    """Counts of a judge, and sums for the correlation of its verdicts with length.

    Attributes:
        lengths: sums over (characters of a completion, its value).
    """

    counts: Counts
    lengths: Moments


def judge_metrics(meters: Sequence[Meter]) -> dict[str, float]:
    """The metrics `judge/*` of a step. A ratio is absent if its denominator is 0.

    Args:
        meters: one per rank. Empty: the run has no judge.
    """
    if not meters:
        return {}
    total = {f.name: sum(getattr(m.counts, f.name) for m in meters) for f in fields(Counts)}
    metrics = {
        "judge/calls": total["calls"],
        "judge/prompt_tokens": total["prompt_tokens"],
        "judge/completion_tokens": total["completion_tokens"],
        "judge/cost_usd": total["usd"],
        "judge/cost_total_usd": total["usd_total"],
        "judge/calls_total": total["calls_total"],
        "judge/retries": total["repeated"],
    }
    for name, part, whole in (
        ("cached_frac", total["cached"], total["asked"]),
        ("unreadable_frac", total["unreadable"], total["calls"]),
        ("failed_frac", total["failed"], total["asked"]),
        ("refused_frac", total["refused"], total["judged"]),
        (
            "position_bias",
            total["first"] - total["second"],
            total["first"] + total["second"],
        ),
        ("unstable_frac", total["unstable"], total["pairs"]),
    ):
        if whole:
            metrics[f"judge/{name}"] = part / whole
    lengths = Moments(*(sum(getattr(m.lengths, f.name) for m in meters) for f in fields(Moments)))
    if (found := lengths.correlation) is not None:
        metrics["judge/length_corr"] = found
    return {name: float(value) for name, value in metrics.items()}
