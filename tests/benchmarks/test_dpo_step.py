"""`benchmarks/dpo_step.py` compares equal work, and its sides of Sixfold run."""

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
    return importlib.import_module("dpo_step")


def lines(*steps: tuple[float, int, int]) -> list[dict[str, Any]]:
    """Output lines of a side: loss, trained tokens and all tokens of each step."""
    names = ("loss", "trained", "tokens")
    return [{"event": "loss", **dict(zip(names, step, strict=True))} for step in steps]


def test_work_is_compared_step_by_step(harness: ModuleType) -> None:
    own = lines((0.69, 10, 14), (0.5, 30, 40))
    harness.check_same_losses("case", {"trl": lines((0.69, 10, 14), (0.50009, 30, 40)), "own": own})
    for message, other in {
        "losses differ": lines((0.69, 10, 14), (0.5002, 30, 40)),
        "tokens of the steps differ": lines((0.69, 11, 14), (0.5, 29, 40)),
    }.items():
        with pytest.raises(SystemExit, match=message):
            harness.check_same_losses("case", {"trl": other, "own": own})


def words(row: dict[str, Any]) -> dict[str, int]:
    """Number of words of each part of a pair."""
    return {name: len(messages[0]["content"].split()) for name, messages in row.items()}


def test_cases_have_the_prompts_that_their_names_say(harness: ModuleType) -> None:
    for name, case in harness.CASES.items():
        for row in case.draw(20, random.Random(0)):
            sizes = words(row)
            answers = sizes["chosen"], sizes["rejected"]
            assert sizes["prompt"] + max(answers) + 3 <= case.longest
            if name.endswith("short"):
                assert sizes["prompt"] <= min(answers)
            if name.endswith("long-prompt"):
                assert sizes["prompt"] > sum(answers)


@pytest.mark.nightly
@pytest.mark.slow
def test_sixfolds_sides_train_on_every_token_of_the_pairs(
    harness: ModuleType, tmp_path: Path
) -> None:
    """The first loss is log 2, and a small learning rate keeps the next ones near it."""
    target = tmp_path / "rows.json"
    harness.main(["--quick", "--steps", "1", "--json", str(target)])
    frozen, cached = json.loads(target.read_text())["rows"]
    assert (frozen["side"], cached["side"]) == ("sixfold", "sixfold-cached")
    pairs = harness.SMALL.draw(3 * harness.SMALL.rows, random.Random(0))
    counts = [words(row) for row in pairs]
    # Each side of a pair has the prompt, two words of the template, and an <eos>.
    needed = sum(2 * n["prompt"] + n["chosen"] + n["rejected"] + 6 for n in counts)
    for row in (frozen, cached):
        assert row["tokens"] == needed
        assert row["loss"] == pytest.approx(math.log(2), abs=0.01) and row["loss"] != math.log(2)
        assert row["seconds"] > 0 and row["tracked_mb"] > 0
