"""Short training runs on environments of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.start import train_run
from sixfold.types import Trajectory
from tests.run.processes import metrics, tiny_recipe

SETTINGS = {
    "run__steps": 2,
    "sft__steps": 0,
    "data__heldout": 4,
    "rollout__max_turns": 4,
    "rollout__max_new_tokens": 3,
    "rollout__max_episode_tokens": 40,
    "environment__timeout_s": 60,
    "eval__every": 2,
}


def trained(folder: Path, spec: str, **more: Any) -> list[Trajectory]:
    """Trajectories of the last step."""
    recipe = tiny_recipe(
        folder, environment__episode=spec, data__source=spec, **{**SETTINGS, **more}
    )
    assert train_run(parse_recipe('run.name = "run"', "test", recipe)) == 0
    lines = metrics(folder / "run")
    assert len(lines) == 2 and "heldout/accuracy" in lines[-1]
    dump = read_rollouts(RunFolder(folder / "run").rollout_file(2))
    played = [Trajectory.from_record(record) for record in dump]
    assert len(played) == 16 and {t.environment for t in played} == {spec}
    assert all(t.reward is not None and t.reward.value is not None for t in played)
    return played


@pytest.mark.slow
def test_a_gymnasium_environment_trains(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    played = trained(tmp_path, "gymnasium:tests.interop.games:tests/Word-v0", data__limit=40)
    assert all(len(t.turns) == 3 for t in played)
    assert {t.outcome for t in played} <= {"ended", "turns", "length"}
    assert all("o" in t.provenance for t in played)


@pytest.mark.slow
def test_an_environment_of_verifiers_trains(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    games = Path(__file__).with_name("vf_games.py")
    played = trained(tmp_path, f"verifiers:{games}?count=8")
    assert all(len(t.turns) == 1 for t in played)
    parts = {name for t in played if t.reward for name in t.reward.parts}
    assert parts == {"right", "short", "num_turns"}
