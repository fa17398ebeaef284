"""Decision functions: every branch and the default row."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold_planning.async_benefit import async_benefit

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("rollout", "trainer", "nodes", "verdict", "low", "high"),
    [
        (40, 10, 4, "yes", 2.0, None),
        (20, 10, 4, "yes", 2.0, None),
        (12, 10, 4, "marginal", 1.2, 1.5),
        (19, 10, 4, "marginal", 1.2, 1.5),
        (10, 19, 4, "marginal", 1.2, 1.5),
        (10, 20, 4, "no", 1.0, 1.1),
        (40, 10, 2, "yes", 2.0, None),
        (10, 40, 4, "no", 1.0, 1.1),
        (40, 10, 1, "no", 1.0, 1.1),
    ],
)
def test_async_table(
    rollout: float,
    trainer: float,
    nodes: int,
    verdict: str,
    low: float,
    high: float | None,
) -> None:
    """L22c: yes 2x and more, marginal 1.2 to 1.5, one node within 10 %."""
    found = async_benefit(rollout_seconds=rollout, trainer_seconds=trainer, nodes=nodes)
    assert (found.verdict, found.low, found.high) == (verdict, low, high)
    assert found.reason
