"""What a judge did in a step, as counts that can be added over ranks, and the metrics from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import sqrt

from .spending import Cost


@dataclass
class Moments:
    """Sums from which a correlation follows.

    Attributes:
        n: number of pairs.
        x: sum of the first values.
        y: sum of the second values.
        xx: sum of squares of the first values.
        yy: sum of squares of the second values.
        xy: sum of products.
    """

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add one pair."""
        for name, value in zip(
            ("n", "x", "y", "xx", "yy", "xy"), (1, x, y, x * x, y * y, x * y), strict=True
        ):
            setattr(self, name, getattr(self, name) + value)

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation. None if one of the values does not vary."""
        if self.n < 3:
            return None
        vx = self.xx / self.n - (self.x / self.n) ** 2
        vy = self.yy / self.n - (self.y / self.n) ** 2
        if vx <= 1e-12 * max(1.0, self.xx / self.n) or vy <= 1e-12:
            return None
        return (self.xy / self.n - self.x * self.y / self.n**2) / sqrt(vx * vy)


@dataclass
class Counts:
    """Counts of one process since they were last taken.

    Attributes:
        asked: questions, cached ones included.
        cached: questions whose answer was known.
        calls: answered requests.
        prompt_tokens: tokens of their prompts.
        completion_tokens: tokens of the replies.
        usd: their price.
        repeated: requests sent again after a failure of the endpoint.
        unreadable: replies that had no verdict.
        failed: questions without an answer.
        judged: completions that should be judged.
        refused: completions that were refused before the judge was asked.
        first: comparisons that the completion shown first won.
        second: comparisons that the completion shown second won.
        pairs: pairs asked in both orders.
        unstable: pairs among them whose verdict changed with the order.
        usd_total: price of the whole run.
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
        """Add the cost of one answered request."""
        self.calls += cost.calls
        self.prompt_tokens += cost.prompt_tokens
        self.completion_tokens += cost.completion_tokens
        self.usd += cost.usd


@dataclass
class Meter:
    """Counts of a judge, and how its verdicts go with length.

    Attributes:
        counts: the counts.
        lengths: characters of completions against their values.
    """

    counts: Counts
    lengths: Moments


def judge_metrics(meters: Sequence[Meter]) -> dict[str, float]:
    """judge/* of a step.

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
