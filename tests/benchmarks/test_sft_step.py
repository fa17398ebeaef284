"""`benchmarks/sft_step.py` compares equal work, and its side of Sixfold runs."""

from __future__ import annotations

import importlib
import json
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return importlib.import_module("sft_step")


def lines(*steps: tuple[float, int]) -> list[dict[str, Any]]:
    """Output lines of a side: loss and trained tokens of each step."""
    return [{"event": "loss", "loss": loss, "trained": count} for loss, count in steps]


def test_the_same_tokens_in_other_steps_are_the_same_work(harness: ModuleType) -> None:
    padded, packed = lines((2.0, 10), (5.0, 30)), lines((4.25, 40))
    harness.check_same_work("case", {"trl": padded, "trl-packed": packed})
    for other in (lines((4.2501, 40)), lines((4.25, 39))):
        with pytest.raises(SystemExit, match="mean loss and trained tokens"):
            harness.check_same_work("case", {"trl": padded, "sixfold": other})


@pytest.mark.nightly
@pytest.mark.slow
def test_sixfolds_side_trains_on_every_token_of_the_rows(
    harness: ModuleType, tmp_path: Path
) -> None:
    """A model with small logits has the loss of a uniform guess."""
    job = importlib.import_module("sft_job")
    target = tmp_path / "rows.json"
    harness.main(["--quick", "--steps", "1", "--json", str(target)])
    (row,) = json.loads(target.read_text())["rows"]
    case, rng = harness.SMALL, random.Random(0)
    lengths = job.draw_lengths(case.shortest, case.longest, 3 * case.rows, rng)
    assert row["side"] == "sixfold" and row["tokens"] == sum(lengths)
    assert row["loss"] == pytest.approx(math.log(96), abs=0.05)
    assert row["seconds"] > 0 and row["tracked_mb"] > 0
