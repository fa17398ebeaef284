"""A whole run that samples through vLLM's process (the stand-in): from SFT to the report, stale on
purpose, and resumed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from sixfold.errors import RunFailed, UserError
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.start import train_run
from sixfold.types import Task

from ..forked_programs import fork_programs
from .processes import metrics, tiny_recipe

FAKE = Path(__file__).parents[1] / "rollout/fake_vllm"


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in."""
    return len(completion) / 12


def run(folder: Path, name: str, steps: int, resume: bool = False, **more: object) -> Path:
    flags = tiny_recipe(
        folder,
        run__steps=steps,
        rollout__backend__kind="vllm",
        rollout__backend__python=sys.executable,
        checkpoint__every=1,
        checkpoint__keep=9,
        **more,
    )
    assert (
        train_run(
            parse_recipe(f"run.name = '{name}'", "test", flags),
            resume=folder / name if resume else None,
            reward=length,
        )
        == 0
    )
    return folder / name


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_programs(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM", "")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stale_run_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """With sync.every = 2 the checkpoint of step 3 holds weights that the sampler has and the
    trainer no longer has.
    """
    stale = dict(sync__kind="copy", sync__every=2)
    whole = run(tmp_path, "whole", 4, **stale)
    steps, halved = metrics(whole), Path(shutil.copytree(whole, tmp_path / "halved"))
    shutil.rmtree(halved / "checkpoints/step-000004")
    run(tmp_path, "halved", 4, resume=True, **stale)
    assert steps == metrics(halved)
    assert [m["sync/staleness"] for m in steps] == [0, 1, 0, 1]
    fresh = [m["mismatch/max_abs_logp"] for m in steps if "mismatch/max_abs_logp" in m]
    assert len(fresh) == 2 and max(fresh) < 1e-4
    sampled = read_rollouts(whole / "rollouts/step-000004.jsonl.zst")
    assert {v for record in sampled for v in record["version"]} == {-1, 2}
    assert "heldout_after" in json.loads((whole / "summary.json").read_text())


@pytest.mark.slow
def test_a_sampler_that_keeps_its_old_weights_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "stale")
    with pytest.raises(RunFailed, match="the weight sync failed: engine and trainer score"):
        run(tmp_path, "stale", 2, trainer__learning_rate=0.01)


@pytest.mark.slow
def test_no_vllm_leaves_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(UserError, match=r"does not have vllm\. Run pip install 'sixfold\[vllm\]'"):
        run(tmp_path, "none", 1)
    assert list(tmp_path.iterdir()) == []
