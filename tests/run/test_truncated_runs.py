"""`sixfold train` on truncated samples: engine and trainer agree, dumps hold what was kept, and a
resumed run repeats it bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.report.rollouts import read_rollouts
from sixfold.types import Trajectory

from .processes import metrics, tiny_recipe

KL = {"algorithm__beta": 0.05, "algorithm__kl": "k3"}


def train(folder: Path, **overrides: object) -> Path:
    """Four steps, checkpoints at 2 and 4."""
    recipe = folder / "recipe.toml"
    recipe.write_text('run.name = "run"\n')
    settings = {"run__steps": 4, "rollout__top_p": 0.9, "log__rollouts_every": 1, **KL, **overrides}
    assert main(["train", str(recipe), *tiny_recipe(folder, **settings)]) == 0
    return folder / "run"


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "rollout__top_k": 6,
            "rollout__min_p": 0.05,
            "reference__placement": "fused",
            "algorithm__minibatches": 2,
        },
    ],
)
def test_a_run_trains_on_what_it_sampled(tmp_path: Path, more: dict[str, object]) -> None:
    """The reference is the policy at first, so over the same sets the first KL is 0."""
    run = train(tmp_path, **more)
    steps = metrics(run)
    assert len(steps) == 4
    assert all(m["mismatch/max_abs_logp"] <= 1e-4 for m in steps)
    assert more or abs(steps[0]["train/kl"]) < 1e-6
    assert steps[-1]["train/kl"] > 1e-6
    assert all(
        (0.0 if more else 0.9) < m["rollout/kept_mass_frac"] < 1.0 < m["rollout/kept_mean"]
        for m in steps
    )
    for step in range(1, 5):
        for record in read_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl.zst"):
            t = Trajectory.from_record(record)
            assert t.kept is not None and len(t.kept) == sum(t.mask)
            assert all(
                n == 1 or x < 0.0
                for n, x in zip(t.kept.counts, t.logp[t.prompt_length :], strict=True)
            )
            assert max(t.kept.counts) <= (6 if more else 10**6)
            assert more or min(t.kept.mass) >= 0.9 - 1e-9
    assert "kept (p" in (run / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_resumed_run_repeats_it_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path)
    for folder in (whole / "checkpoints").iterdir():
        if folder.name > "step-000002":
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
    before = metrics(whole)
    dumps = {
        path.name: [Trajectory.from_record(r).kept for r in read_rollouts(path)]
        for path in (whole / "rollouts").iterdir()
    }
    assert main(["train", "--resume", str(whole)]) == 0
    assert metrics(whole) == before
    assert {
        path.name: [Trajectory.from_record(r).kept for r in read_rollouts(path)]
        for path in (whole / "rollouts").iterdir()
    } == dumps
