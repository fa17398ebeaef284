"""Published formulas worked out in float64 (tests/data/golden_loop.json), and the tables they were
worked out on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sixfold.batch import Batch

DATA = Path(__file__).parents[1] / "data"
CASES: dict[str, Any] = json.loads((DATA / "golden_loop.json").read_text())
ALGORITHM_CASES: dict[str, Any] = {
    case["name"]: case
    for case in json.loads((DATA / "golden_algorithms.json").read_text())["cases"]
}
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence-sum",
    "seq-mean-token-sum-norm": "constant",
}
"""The file's names for the ways to average, and ours."""


def table(case: str, name: str, side: str = "inputs") -> Tensor:
    """One table of a case in float64; `mask` as bool."""
    values = torch.tensor(CASES[case][side][name], dtype=torch.float64)
    return values.bool() if name == "mask" else values


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B] or [B, T] -> [B, T]."""
    return advantages * mask if advantages.ndim == 2 else advantages[:, None] * mask


def batch_of(mask: Tensor, old_logp: Tensor, group: Tensor | None = None, **tables: Any) -> Batch:
    """A batch of just the tables that a loss reads; a reward of 0 on every row."""
    b, t = mask.shape
    return Batch(
        tokens=torch.zeros(b, t, dtype=torch.int64),
        mask=mask,
        old_logp=old_logp,
        version=torch.zeros(b, t, dtype=torch.int64),
        rewards=tables.pop("rewards", torch.zeros(b, t, dtype=old_logp.dtype)),
        lengths=mask.sum(-1),
        prompt_lengths=torch.ones(b, dtype=torch.int64),
        group=torch.zeros(b, dtype=torch.int64) if group is None else group,
        **tables,
    )


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to the six decimals that the file gives."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-6, rtol=0)
