"""Ends of a completion that the recipe adds are saved with the model. A resumed run uses its own
recipe.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sixfold.commands.generate import Options, generate
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run

from .processes import tiny_recipe

ASKED: dict[str, Any] = dict(prompt="1+2=", n=8, max_tokens=20, seed=1, device="cpu")


def train(
    folder: Path, steps: int, stop: str, tokens: str = "auto", *, resume: bool = False
) -> None:
    settings = {
        "run__name": "r",
        "run__steps": steps,
        "sft__steps": 1,
        "rollout__stop": stop,
        "rollout__stop_tokens": tokens,
    }
    recipe = parse_recipe(
        'run.name = "r"', "test", tiny_recipe(folder, run__target_reward=9.0, **settings)
    )
    assert train_run(recipe, resume=folder / "r" if resume else None) == 0


def saved(folder: Path, step: int) -> dict[str, Any]:
    """The generation settings of a checkpoint's model."""
    settings: dict[str, Any] = json.loads(
        (folder / f"r/checkpoints/step-{step:06}/model/generation_config.json").read_text()
    )
    return settings


@pytest.mark.nightly
@pytest.mark.slow
def test_generate_stops_where_the_run_stopped_and_resume_where_it_is_told_to(
    tmp_path: Path,
) -> None:
    train(tmp_path, 1, "=")
    assert saved(tmp_path, 1)["stop_strings"] == ["="]
    free = tmp_path / "free"
    shutil.copytree(tmp_path / "r/checkpoints/step-000001/model", free)
    (free / "generation_config.json").write_text(
        json.dumps({k: v for k, v in saved(tmp_path, 1).items() if k != "stop_strings"})
    )
    whole, cut = (generate(Options(model=str(path), **ASKED)) for path in (free, tmp_path / "r"))
    assert any("=" in text for text in whole)
    assert cut == [text.partition("=")[0] for text in whole]
    own = saved(tmp_path, 1)["eos_token_id"]
    train(tmp_path, 2, "#", "auto,7", resume=True)
    assert saved(tmp_path, 2)["stop_strings"] == ["#"] and saved(tmp_path, 2)["eos_token_id"] != own
    train(tmp_path, 3, "", resume=True)
    assert "stop_strings" not in saved(tmp_path, 3)
    now = saved(tmp_path, 3)["eos_token_id"]
    assert {own} if isinstance(own, int) else {*own} == ({now} if isinstance(now, int) else {*now})
