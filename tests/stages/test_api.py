"""`sixfold.train` runs the stages of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sixfold
from sixfold.errors import UserError
from tests.stages.test_bad_input import HEAD, RL, SFT


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "p.toml").write_text(HEAD + SFT + RL)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "p.toml"


@pytest.mark.nightly
@pytest.mark.slow
def test_all_stages_run_and_resume(recipe: Path) -> None:
    folder = sixfold.train(recipe, settings={"stages.sft.sft.steps": 2})
    assert folder == Path("runs/p")
    table = json.loads((folder / "stages.json").read_bytes())
    assert [(row["stage"], row["steps"]) for row in table] == [("sft", 2), ("rl", 1)]
    with pytest.raises(UserError, match=r"already holds a run.*resume=True, overwrite=True"):
        sixfold.train(recipe)
    with pytest.raises(UserError, match=r"'sft' is finished.*sft.steps.*again: first='sft'; or"):
        sixfold.train(recipe, resume=True)
    (folder / "stages" / "rl" / "artifact.json").unlink()
    sixfold.train(recipe, settings={"stages.sft.sft.steps": 2}, resume=True)
    assert json.loads((folder / "stages.json").read_bytes()) == table
    sixfold.train(recipe, settings={"stages.sft.sft.steps": 3}, first="sft")
    assert json.loads((folder / "stages.json").read_bytes())[0]["steps"] == 3
    sixfold.train(recipe, overwrite=True, only="sft")
    assert [row["stage"] for row in json.loads((folder / "stages.json").read_bytes())] == ["sft"]
    sixfold.train(recipe, overwrite=True)
    assert json.loads((folder / "stages.json").read_bytes())[0]["steps"] == 1


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("reward", lambda completion, task: 1.0, r"environment\.rewards"),
        ("tasks", [sixfold.Task("0", "1+1=", answer="2")], r"data\.source"),
    ],
)
def test_objects_are_refused_with_the_setting_of_a_stage(
    recipe: Path, name: str, value: object, setting: str
) -> None:
    with pytest.raises(UserError, match=rf"^{name} is given, but the recipe has stages.*{setting}"):
        sixfold.train(recipe, **{name: value})  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_stages_are_named_for_a_recipe_that_has_them(recipe: Path) -> None:
    for arguments, why in (
        ({"only": "rl", "first": "sft"}, "not both"),
        ({"only": "lr"}, "has no stage 'lr'"),
        ({"first": "rl"}, r"Run it first: only='sft', or all stages"),
    ):
        with pytest.raises(UserError, match=why):
            sixfold.train(recipe, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"only and first name a stage"):
        sixfold.train("demo", only="rl")
    assert not Path("runs/p").exists()
