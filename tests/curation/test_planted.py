"""Recall and precision of the stages on a small planted set, by the benchmark's own script."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "curation_planted.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("curation_planted", SCRIPT)
    assert spec and spec.loader
    module = sys.modules["curation_planted"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_set_has_the_faults_that_its_truth_says(script: ModuleType) -> None:
    rows, prompts = script.planted(1000, 0, "tuned")
    truth = Counter(script.truths(rows).values())
    assert len(rows) == 1000 and len(prompts) > 30
    assert truth["licence"] == truth["personal_data"] == truth["language"] == 30
    assert truth["conflict"] == 40 and truth["duplicate"] == truth["reformatted"] == 40
    assert rows == script.planted(1000, 0, "tuned")[0] != script.planted(1000, 1, "tuned")[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_each_stage_finds_its_faults_and_little_else(script: ModuleType, tmp_path: Path) -> None:
    figures = script.measured(*script.planted(2000, 3, "tuned"), tmp_path)
    assert {stage.kind for stage in figures} == set(script.STAGE_OF.values())
    short = {s.kind: (s.recall, s.precision) for s in figures if min(s.recall, s.precision) < 0.95}
    assert not short
