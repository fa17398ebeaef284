"""A run, a checkpoint, a model folder or a hub id: one answer for every command, and no damaged
weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.checkpoint.checkpoint import save_checkpoint
from sixfold.checkpoint.model_source import model_folder, recorded_models, with_model_folders
from sixfold.checkpoint.payload import Payload
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.recipe.dump import flat
from sixfold.recipe.schema import ModelConfig, Recipe
from sixfold.recipe.toml import load_recipe

SIZES = [
    f"--model.scratch.{key}={value}"
    for key, value in dict(
        hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, context=128
    ).items()
]
SHORT = [
    *(
        "--sft.steps",
        "0",
        "--run.steps",
        "1",
        "--rollout.prompts_per_step",
        "2",
        "--rollout.samples_per_prompt",
        "2",
    ),
    *(
        "--rollout.max_new_tokens",
        "8",
        "--data.limit",
        "40",
        "--data.heldout",
        "4",
        "--checkpoint.every",
        "1",
    ),
]


@pytest.fixture(scope="module")
def run(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    (folder / "recipe.toml").write_text("")
    for step in (1, 2):
        save_checkpoint(
            folder / "checkpoints",
            step,
            write_model=policy.save,
            model_bytes=1 << 20,
            payload=Payload({}, {}, {}),
        )
    return folder


def test_a_run_is_its_newest_intact_checkpoint(run: Path) -> None:
    newest = run / "checkpoints" / "step-000002"
    assert model_folder(str(run)) == model_folder(str(newest)) == str(newest / "model")
    assert model_folder(str(newest / "model")) == str(newest / "model")
    assert model_folder("owner/name") == "owner/name"


def test_damaged_weights_are_passed_over_in_a_run_and_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-000002"
    weights = newest / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert model_folder(str(run)) == str(run / "checkpoints" / "step-000001" / "model")
        assert "step-000002" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"model\.safetensors"):
            model_folder(str(newest))
        assert main(["generate", str(newest), "--prompt", "1+1="]) == 2
    finally:
        weights.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs/nope", "./x", "x" * 5000, "a\0b", "", " "])
@pytest.mark.parametrize("verb", ["generate", "serve", "train"])
def test_missing_paths_are_refused_immediately(
    verb: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never asked of the hub, and never a traceback. An empty model.path means a model from
    scratch.
    """
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *a, **k: pytest.fail("asked the hub")
    )
    if verb == "train" and not name:
        return
    arguments = {
        "generate": [name, "--prompt", "1"],
        "serve": [name, "--port", "0"],
        "train": ["demo", "--model.path", name],
    }
    assert main([verb, *arguments[verb]]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_recipes_take_runs(run: Path) -> None:
    recipe = Recipe(model=ModelConfig(path=str(run)))
    recipe = recipe.model_copy(
        update={
            "reference": recipe.reference.model_copy(
                update={"path": str(run / "checkpoints" / "step-000001")}
            )
        }
    )
    found = with_model_folders(recipe)
    assert found.model.path == str(run / "checkpoints" / "step-000002" / "model")
    assert found.reference.path == str(run / "checkpoints" / "step-000001" / "model")
    assert with_model_folders(found) == found and with_model_folders(Recipe()) == Recipe()


def test_addresses_of_reward_models_are_kept() -> None:
    """A server is no folder, and no name on the hub; its neighbours are looked up."""
    served = ("reward_model:http://127.0.0.1:1/a, https://h.org/b", "prm:http://127.0.0.1:1")
    recipe = Recipe().with_settings({"environment.rewards": list(served)})
    found = with_model_folders(recipe).environment.rewards
    assert [name.replace(" ", "") for name in found] == [name.replace(" ", "") for name in served]
    wrong = Recipe().with_settings({"environment.rewards": ["reward_model:http://h, runs/none"]})
    with pytest.raises(UserError, match="no reward model at 'runs/none'"):
        with_model_folders(wrong)


def test_a_started_run_keeps_the_checkpoints_that_it_has_recorded(run: Path) -> None:
    asked = Recipe(model=ModelConfig(path=str(run)))
    older = str(run / "checkpoints" / "step-000001" / "model")
    recorded = flat(asked) | {"model.path": older, "reference.path": "elsewhere"}
    assert recorded_models(flat(asked), recorded) == {"model.path": older}
    other = Recipe(model=ModelConfig(path=str(run.parent / "other")))
    assert recorded_models(flat(other), recorded) == recorded_models(flat(Recipe()), recorded) == {}


@pytest.mark.slow
def test_a_run_trains_on_from_another_and_remembers_where(run: Path, tmp_path: Path) -> None:
    settings = [
        "--model.path",
        str(run),
        "--reference.path",
        str(run),
        "--algorithm.beta",
        "0.1",
        *SHORT,
        "--run.dir",
        str(tmp_path),
    ]
    assert main(["explain", "demo", *settings]) == 0
    assert main(["train", "demo", *settings, "--run.name", "next"]) == 0
    saved = load_recipe(str(tmp_path / "next" / "recipe.toml"))
    assert (
        saved.model.path
        == saved.reference.path
        == str(run / "checkpoints" / "step-000002" / "model")
    )
    assert json.loads((tmp_path / "next" / "summary.json").read_text())


@pytest.mark.slow
def test_generate_asks_for_what_fits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's context is 128 tokens, and the default was 256."""
    assert main(["generate", str(run), "--prompt", "12+7="]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["generate", str(run), "--prompt", "12+7=", "--max-tokens", "500"]) == 2
    assert "--max-tokens" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "1" * 200]) == 2
    assert "--prompt" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "1", "--temperature", "1e-39"]) == 2
