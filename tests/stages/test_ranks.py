"""Stages on two ranks: a run resumes with the same bits after one rank was killed."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.rank_runs import train_on_ranks
from tests.stages.staged_runs import flags, result

TEXT = """\
run.name = "p"

[[stages]]
kind = "sft"
name = "first"
sft.steps = 3

[[stages]]
kind = "sample"
sample.tasks = 8
sample.samples = 2
sample.keep = "reward"
sample.threshold = 0.0
sample.min_rows = 1

[[stages]]
kind = "rl"
run.steps = 2
"""


def with_fault(fault: str, rank: int) -> None:
    """Let rank 1 be killed."""
    if rank == 1:
        os.environ["SIXFOLD_FAULT"] = fault


def run_stages(place: Path, *more: str, fault: str = "") -> list[int | None]:
    (place / "p.toml").write_text(TEXT)
    own = flags(place, rollout__max_new_tokens=8)
    if more:  # a resumed run stays in its folder
        at = own.index("--run.dir")
        del own[at : at + 2]
    argv = ["train", *(more or (str(place / "p.toml"),)), *own]
    return train_on_ranks(2, argv, place / "log", partial(with_fault, fault)).codes()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_lost_rank_costs_nothing(tmp_path: Path) -> None:
    assert run_stages(tmp_path) == [0, 0], (tmp_path / "log").read_text()
    whole = result(tmp_path / "p")
    shutil.rmtree(tmp_path / "p")
    assert 137 in run_stages(tmp_path, fault="checkpoint.:2")
    assert run_stages(tmp_path, "--resume", str(tmp_path / "p")) == [0, 0]
    assert result(tmp_path / "p") == whole
