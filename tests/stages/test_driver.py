"""Stages run in order, resume after a kill at any point, and are made again on request."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sixfold.checkpoint.model_source import model_folder, with_model_folders
from sixfold.commands import eval as evaluate
from sixfold.commands.export import export
from sixfold.errors import UserError
from sixfold.recipe.stages import StagedRecipe
from sixfold.recipe.toml import load_staged, parse_recipe, parse_staged
from sixfold.stages.artifact import Artifact
from sixfold.stages.driver import train_stages
from tests.run.processes import start
from tests.stages.staged_runs import TEXT, flags, result, staged


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs: an adapter names its base by an absolute path, which is hashed."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run without interruption."""
    assert train_stages(staged(place)) == 0
    kept = place / "whole"
    (place / "p").rename(kept)
    return kept


@pytest.fixture
def run(whole: Path, place: Path) -> Any:
    """A copy of the whole run, in the place where it was made."""
    shutil.copytree(whole, place / "p")
    yield place / "p"
    shutil.rmtree(place / "p")


@pytest.fixture
def empty(whole: Path, place: Path) -> Any:
    """The place of a new run."""
    yield place / "p"
    shutil.rmtree(place / "p", ignore_errors=True)


def artifact(run: Path, stage: str) -> dict[str, Any]:
    return json.loads((run / "stages" / stage / "artifact.json").read_bytes())  # type: ignore[no-any-return]


def changed(place: Path, old: str, new: str) -> StagedRecipe:
    return parse_staged(TEXT.replace(old, new), "p.toml", flags(place))


@pytest.mark.slow
def test_each_stage_reads_what_the_one_before_it_has_made(whole: Path) -> None:
    table = json.loads((whole / "stages.json").read_bytes())
    assert [(row["stage"], row["kind"], row["made"], row["steps"]) for row in table] == [
        ("first", "sft", "model", 4),
        ("second", "sft", "model", 3),
        ("adapted", "rl", "adapter", 3),
        ("last", "rl", "adapter", 2),
    ]
    made = {row["stage"]: row["sha256"] for row in table}
    assert artifact(whole, "second")["inputs"] == {"first": made["first"]}
    assert artifact(whole, "adapted")["inputs"] == {"second": made["second"]}
    assert artifact(whole, "last")["inputs"] == {"adapted": made["adapted"]}
    drifts = [row["kl"] for row in table]
    assert drifts[0] is None and all(drift >= 0 for drift in drifts[1:])
    page = (whole / "report.html").read_text()
    assert all(f'href="stages/{name}/report.html"' in page for name in made)
    losses = [line.get("heldout/loss") for line in result(whole)["first"]["metrics"]]
    assert losses[1] > losses[3] > 0 and losses[0] is None


def killed_and_resumed(place: Path, fault: str) -> dict[str, Any]:
    """Result of a run that is killed at a fault point, and then resumed."""
    errors = place / "errors"
    process = start(flags(place), errors, fault=fault, text=TEXT)
    process.join()
    assert process.exitcode == 137, errors.read_text()
    folder = place / "p"
    resume = folder if (folder / "recipe.toml").is_file() else None
    assert train_stages(staged(place), resume=resume, overwrite=not resume) == 0
    return result(folder)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["artifact.publish:1", "artifact.publish:4", "checkpoint.:30"])
def test_a_kill_between_stages_or_within_one_loses_nothing(
    whole: Path, empty: Path, place: Path, fault: str
) -> None:
    assert killed_and_resumed(place, fault) == result(whole)


@pytest.mark.slow
def test_a_stage_without_an_artifact_goes_on_from_its_last_checkpoint(
    run: Path, whole: Path, place: Path
) -> None:
    """As after a kill in its last step, or before its artifact was written."""
    last = run / "stages" / "last"
    for name in ("artifact.json", "summary.json", "drift.json"):
        (last / name).unlink()
    shutil.rmtree(last / "checkpoints" / "step-000002")
    (run / "stages" / "adapted" / "artifact.json").unlink()
    assert train_stages(staged(place), resume=run) == 0
    assert result(run) == result(whole)


@pytest.mark.slow
def test_a_checkpoint_that_a_kill_has_left_is_deleted(run: Path, whole: Path, place: Path) -> None:
    """As after a kill between the last save and the deletion of what is not kept."""
    stage = run / "stages" / "second"
    for name in ("artifact.json", "summary.json", "drift.json"):
        (stage / name).unlink()
    shutil.copytree(stage / "checkpoints" / "step-000002", stage / "checkpoints" / "step-000000")
    assert train_stages(staged(place), resume=run) == 0
    assert result(run) == result(whole)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("draw", range(40))
def test_a_kill_at_any_point_loses_nothing(
    whole: Path, empty: Path, place: Path, draw: int
) -> None:
    """40 of the fault points of a whole run, which writes about 150 times."""
    fault = f":{random.Random(draw).randint(1, 150)}"
    assert killed_and_resumed(place, fault) == result(whole)


@pytest.mark.slow
def test_finished_stages_are_not_made_again(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sixfold.stages.driver.run_work", lambda *a, **k: pytest.fail("made again"))
    assert train_stages(staged(place), resume=run) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_stages_from_one_on_are_made_again(run: Path, whole: Path, place: Path) -> None:
    other = changed(place, "sft.learning_rate = 5e-4", "sft.learning_rate = 4e-4")
    with pytest.raises(UserError, match=r"'second' is finished, .* 0\.0005 -> 0\.0004.*--from sec"):
        train_stages(other, resume=run)
    with pytest.raises(UserError, match=r"'second' is finished"):
        train_stages(other, first="adapted")
    assert result(run) == result(whole)  # nothing has changed
    assert train_stages(other, first="second") == 0
    now, before = result(run), result(whole)
    assert now["first"] == before["first"]
    assert all(now[name]["sha256"] != before[name]["sha256"] for name in ("second", "last"))
    assert not (run / "replaced").exists()


@pytest.mark.slow
def test_a_stage_that_its_time_ended_is_not_taken_for_finished_with_more_time(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "stages/second/summary.json"
    ended = {"reason": "max_minutes", "text": "", "step": 2}
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "seconds": 90, "ended": ended}))
    for minutes in (0, 2.0):
        with pytest.raises(UserError, match=r"'second' is finished, but run.max_minutes ended it"):
            train_stages(staged(place, run__max_minutes=minutes), resume=run)
    monkeypatch.setattr("sixfold.stages.driver.run_work", lambda *a, **k: pytest.fail("made again"))
    assert train_stages(staged(place, run__max_minutes=1.0), resume=run) == 0


def test_a_stage_is_evaluated_on_its_own_dataset(tmp_path: Path) -> None:
    text = (
        '[[stages]]\nkind = "sample"\nname = "keep"\n[[stages]]\nkind = "rl"\n'
        'data.source = "stage:keep"\ndata.heldout = 4\n'
    )
    stage = tmp_path / "stages/rl"
    stage.mkdir(parents=True)
    for folder in (tmp_path, stage):
        (folder / "recipe.toml").write_text(parse_staged(text, "p.toml", ()).dump())
    found = evaluate.recipe_of(stage / "recipe.toml", ())
    assert found.data.source == str(tmp_path / "stages/keep/dataset.jsonl")


def test_a_run_is_evaluated_by_what_its_stages_have_made(tmp_path: Path) -> None:
    """A reward model of an earlier stage is a folder, not a dataset."""
    text = (
        '[[stages]]\nkind = "sample"\nname = "drawn"\nsample.keep = "all"\n'
        '[[stages]]\nkind = "reward_model"\nname = "judge"\nreward_model.steps = 5\n'
        'data.source = "stage:drawn"\n'
        '[[stages]]\nkind = "rl"\nenvironment.rewards = ["stage:judge,stage:judge", "arithmetic"]\n'
    )
    stages = {name: tmp_path / "stages" / name for name in ("drawn", "judge", "rl")}
    for name, folder in stages.items():
        folder.mkdir(parents=True)
        made, path = ("dataset", "dataset.jsonl") if name == "drawn" else ("model", "checkpoints/5")
        whole = Artifact(name, "", made, path, "", {}, {})
        (folder / "artifact.json").write_text(json.dumps(asdict(whole)))
        (folder / "recipe.toml").write_text("")
    (tmp_path / "recipe.toml").write_text(parse_staged(text, "p.toml", ()).dump())
    model = stages["judge"] / "checkpoints/5"
    recipes = [evaluate.recipe_of(at / "recipe.toml", ()) for at in (tmp_path, stages["rl"])]
    (file := tmp_path / "p.toml").write_text(text)
    place = ("--run.dir", str(tmp_path.parent), "--run.name", tmp_path.name)
    for recipe in (*recipes, evaluate.named_recipe(f"{file}:rl", place)):
        assert recipe.environment.rewards == (f"reward_model:{model},{model}", "arithmetic")
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["AForSequenceClassification"]}')
    compared = evaluate.named_recipe(f"{file}:judge", place, [str(model)])
    assert compared.data.source == str(stages["drawn"] / "dataset.jsonl")
    (stages["judge"] / "artifact.json").unlink()
    rewards = evaluate.named_recipe(f"{file}:rl", place).environment.rewards
    assert rewards[0] == "reward_model:stage:judge,stage:judge"  # refused when it is loaded


@pytest.mark.slow
def test_a_change_that_is_refused_is_not_recorded(run: Path, whole: Path, place: Path) -> None:
    last = run / "stages" / "last"
    for name in ("artifact.json", "summary.json", "drift.json"):
        (last / name).unlink()
    shutil.rmtree(last / "checkpoints" / "step-000002")
    end = "run.steps = 2\nmodel.lora.rank = "
    with pytest.raises(UserError, match=r"model\.lora\.rank cannot change from 2 to 4 on resume"):
        train_stages(changed(place, f"{end}2", f"{end}4"), resume=run)
    again = load_staged(str(run / "recipe.toml"), ())
    assert train_stages(again, resume=run) == 0
    assert result(run) == result(whole)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"only": "second"}, {"first": "second"}])
def test_finished_stages_are_not_overwritten_for_one(
    run: Path, whole: Path, place: Path, asked: dict[str, str]
) -> None:
    with pytest.raises(UserError, match=r"its stages adapted, first, .* --from second makes"):
        train_stages(staged(place), overwrite=True, **asked)
    assert result(run) == result(whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_stage_alone_needs_the_ones_it_reads(empty: Path, place: Path, whole: Path) -> None:
    with pytest.raises(UserError, match=r"model.path = 'stage:first', but stage 'first' has not"):
        train_stages(staged(place), only="second")
    assert train_stages(staged(place), only="first", overwrite=True) == 0
    assert [path.name for path in (empty / "stages").iterdir()] == ["first"]
    assert train_stages(staged(place), only="second") == 0
    assert result(empty)["second"] == result(whole)["second"]
    assert train_stages(staged(place), resume=empty) == 0
    assert result(empty) == result(whole)


@pytest.mark.slow
def test_an_artifact_that_was_changed_is_refused(run: Path, place: Path) -> None:
    shutil.rmtree(run / "stages" / "last")
    model = run / "stages" / "adapted" / artifact(run, "adapted")["path"] / "model"
    file = model / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        train_stages(staged(place), resume=run)


@pytest.mark.slow
def test_an_earlier_stage_that_was_made_anew_is_noticed(run: Path, place: Path) -> None:
    path = run / "stages" / "second" / "artifact.json"
    path.write_text(json.dumps({**artifact(run, "second"), "sha256": "0" * 64}))
    with pytest.raises(UserError, match=r"'adapted' is finished, .* another result of .* 'second'"):
        train_stages(staged(place), resume=run)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"only": "thrid"}, {"first": "thrid"}])
def test_an_unknown_stage_is_refused(place: Path, asked: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"no stage .thrid.\. Its stages are first, second"):
        train_stages(staged(place), **asked)


@pytest.mark.slow
def test_a_run_with_stages_stands_for_its_last_finished_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def model_of(stage: str) -> str:
        return str(run / "stages" / stage / artifact(run, stage)["path"] / "model")

    assert model_folder(str(run)) == model_of("last")
    recipe = parse_recipe(f'run.name = "x"\nmodel.path = "{run}"\n', "x.toml")
    assert with_model_folders(recipe).model.path == model_of("last")
    assert export(str(run), tmp_path / "out", merge=True) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    (run / "stages" / "last" / "artifact.json").unlink()  # not finished: its checkpoints stay
    assert model_folder(str(run)) == model_of("adapted")
    for name in ("first", "second", "adapted"):
        (run / "stages" / name / "artifact.json").unlink()
    with pytest.raises(UserError, match=r"none of its stages \(first, second, .*--resume"):
        model_folder(str(run))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["show"], ["replay", "--step", "1"], ["diff"]])
def test_commands_for_one_run_name_the_folders_of_its_stages(run: Path, words: list[str]) -> None:
    verb, *more = words
    command = importlib.import_module(f"sixfold.commands.{verb}")
    both = [str(run), str(run / "stages" / "last")] if verb == "diff" else [str(run)]
    with pytest.raises(UserError, match=r"stages/first, .*stages/last$"):
        command.run([*both, *more])


@pytest.mark.slow
def test_a_run_with_stages_is_evaluated_on_the_tasks_of_its_recipe(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = run / "stages" / "second"
    out = tmp_path / "out"
    assert evaluate.run([str(run), str(second), "--out", str(out)]) == 0
    assert "stages/second was trained with another data.arithmetic" in "".join(capsys.readouterr())
    found = json.loads((out / "results.json").read_bytes())["checkpoints"]
    last = json.loads((run / "stages" / "last" / "summary.json").read_bytes())
    assert [one["checkpoint"] for one in found] == [str(run), str(second)]
    assert found[0]["accuracy"] == last["heldout_after"] and found[0]["step"] == 2


@pytest.mark.slow
def test_a_first_stage_that_is_refused_leaves_no_run(place: Path) -> None:
    text = TEXT.replace("sft.steps = 4", "sft.steps = 4\nsft.tasks = 100000")
    with pytest.raises(UserError, match=r"stage 'first': sft.tasks = 100000"):
        train_stages(parse_staged(text, "p.toml", flags(place)))
    assert not (place / "p").exists()
