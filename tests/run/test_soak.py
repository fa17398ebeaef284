"""The short form of `benchmarks/soak.py`: a tiny run, killed about every second."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .processes import TINY, start

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


class Forked:
    """Run in a process that is forked from a server, so it starts in milliseconds."""

    def __init__(self, flags: list[str], errors: Path, resume: Path | None) -> None:
        self._process = start(flags, errors, resume)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode


@pytest.mark.nightly
@pytest.mark.slow
def test_run_killed_every_second_keeps_every_promise(tmp_path: Path, soak: ModuleType) -> None:
    """Broken promises are found too: the same folders are damaged in one way after the other."""
    settings = {**TINY, **soak.SETTINGS, "sft.steps": 4, "checkpoint.every": 2}

    def launch(flags: list[str], resume: Path | None) -> Forked:
        return Forked(flags, tmp_path / "errors", resume)

    report = soak.soak(launch, tmp_path, settings, seconds=3.0, every=0.7, seed=0)
    assert report.broken == [], (tmp_path / "errors").read_text()
    assert report.kills >= 3 and report.steps >= 3
    assert report.slope_of_lives is not None

    killed, clean = tmp_path / "killed", tmp_path / "clean"
    first, second = (killed / f"rollouts/step-{n:06d}.jsonl.zst" for n in (1, 2))
    shutil.copy(first, second)
    assert [line.partition(":")[0] for line in soak.ledger(killed, report.steps)] == ["ledger"]
    assert soak.compare(killed, clean) == ["equal: rollouts/step-000002.jsonl.zst differs"]
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    changed = json.loads(lines[1]) | {"reward/mean": 0.123}
    (killed / "metrics.jsonl").write_text(
        "\n".join([lines[0], json.dumps(changed), *lines[2:], ""])
    )
    assert soak.compare(killed, clean)[0].startswith("equal: metrics differ from step 2 on")
    (killed / "checkpoints" / ".saving-step-000009").mkdir()
    assert soak.litter(tmp_path) == ["files: killed/checkpoints/.saving-step-000009 is left"]


def test_slope_of_memory_is_a_fit_with_an_intercept_per_process(soak: ModuleType) -> None:
    lives = []
    for start_mb in (100.0, 300.0):
        life = soak.Life([float(s) for s in range(60)])
        life.megabytes = [start_mb + s / 30 for s in range(60)]  # 2 MB per minute
        lives.append(life)
    assert soak.slope(lives) == pytest.approx(2.0)
    assert soak.slope([soak.Life()]) is None


def test_processes_that_outlive_their_trainer_are_found(tmp_path: Path, soak: ModuleType) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        life = soak.Life()
        life.observe(os.getpid(), 1.0)
        assert child.pid in {pid for pid, _ in life.children}
        soak.GRACE_S = 0.1
        found = soak._left_behind(tmp_path, life, "it")
        assert any(f"processes: {child.pid} outlives it" == line for line in found)
    finally:
        child.kill()
        child.wait()
    assert (child.pid, "") not in soak.processes()
