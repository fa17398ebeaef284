"""Resumes that are refused: the message, and that a refusal changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from sixfold.checkpoint.manifest import write_manifest
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run

from .processes import tiny_recipe

ROWS = [
    {"question": f"{i}+{j}=", "answer": i + j, "hint": f"h{i}"} for i in range(6) for j in range(6)
]
REWARD = "def mine(completion, task):\n    return float(str(task.answer) in completion)\n"


def write_inputs(folder: Path, *, rows: list[dict[str, Any]] = ROWS, reward: str = REWARD) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(reward)


def train(folder: Path, *, resume: bool = False, **overrides: Any) -> int:
    settings = {
        "run__name": "r",
        "run__steps": 2,
        "sft__steps": 1,
        "data__source": folder / "data.jsonl",
    }
    settings |= {
        "environment__rewards": f"{folder}/rewards.py:mine",
        "run__target_reward": 9.0,
        **overrides,
    }
    recipe = parse_recipe('run.name = "r"', "test", tiny_recipe(folder, **settings))
    return train_run(recipe, resume=folder / "r" if resume else None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, rewards and a run of two steps."""
    folder = tmp_path_factory.mktemp("whole")
    write_inputs(folder)
    assert train(folder) == 0
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that stands in the place of the original."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".sixfold-run"
    }


def refusal(folder: Path, **overrides: Any) -> str:
    """The message of a resume that must be refused, and must change no file."""
    before = contents(folder)
    with pytest.raises(UserError) as error:
        train(folder, resume=True, **overrides)
    assert contents(folder) == before
    return str(error.value)


def spoil_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("{}")


def make_newer(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_state, "state.json is truncated"),
        (make_newer, "upgrade sixfold"),
        (shutil.rmtree, "restore a checkpoint, or start over with --overwrite"),
    ],
)
def test_where_no_checkpoint_can_be_used_the_run_is_left_as_it_is(
    folder: Path, spoil: Callable[[Path], None], said: str
) -> None:
    for checkpoint in (folder / "r" / "checkpoints").iterdir():
        spoil(checkpoint)
    assert said in refusal(folder)
    before = contents(folder)
    assert main(["train", "--resume", str(folder / "r")]) == 2
    assert contents(folder) == before


def test_run_of_a_newer_release_does_not_fall_back_to_an_older_checkpoint(folder: Path) -> None:
    make_newer(max((folder / "r" / "checkpoints").iterdir()))
    assert "upgrade sixfold" in refusal(folder)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model__path": "elsewhere"}, "model.path"),
        ({"model__scratch__hidden_size": 24}, "model.scratch.hidden_size"),
        ({"sync__kind": "copy"}, "sync.kind"),
        ({"run__seed": 1}, "run.seed"),
        ({"sft__steps": 9}, "sft.steps"),
        ({"algorithm__name": "ppo"}, "algorithm.name"),
    ],
)
def test_a_setting_that_cannot_take_effect_is_refused_by_name(
    folder: Path, overrides: dict[str, Any], key: str
) -> None:
    said = refusal(folder, **overrides)
    assert said.startswith(f"{key} cannot change from ") and "start a new run" in said


def test_component_that_the_checkpoint_lacks_is_refused_by_name(folder: Path) -> None:
    said = refusal(folder, run__steps=3, algorithm__beta=0.1)
    assert "component 'reference'" in said and "algorithm.beta = 0" in said


@pytest.mark.slow
def test_component_that_the_run_lacks_is_refused_by_name(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert train(tmp_path, run__steps=1, algorithm__beta=0.1) == 0
    said = refusal(tmp_path, run__steps=3)
    assert "component 'reference'" in said and "algorithm.beta > 0" in said


@pytest.mark.slow
def test_checkpoint_of_an_earlier_release_is_refused_and_never_skipped(folder: Path) -> None:
    newest = max((folder / "r" / "checkpoints").iterdir())
    (newest / "state.json").write_text(json.dumps({"step": 2, "counters": {"version": 2}}))
    (newest / "manifest.json").unlink()
    write_manifest(newest, 2)
    said = refusal(folder, run__steps=3)
    assert "earlier release" in said and f"model.path = '{newest}'" in said


@pytest.mark.slow
def test_a_recipe_edited_by_hand_is_compared_with_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = folder / "r" / "recipe.toml"
    text = recipe.read_text()
    recipe.write_text(
        text.replace("[model]\n", '[model]\npath = "elsewhere"\n').replace('path = ""\n', "", 1)
    )
    before = contents(folder)
    assert main(["train", "--resume", str(folder / "r")]) == 2
    assert "model.path cannot change" in capsys.readouterr().err and contents(folder) == before
    recipe.write_text(
        text.replace("learning_rate = 0.001\nschedule", "learning_rate = 0.002\nschedule")
    )
    assert main(["train", "--resume", str(folder / "r")]) == 0
    assert (
        "resuming with changed settings: trainer.learning_rate 0.001 -> 0.002"
        in capsys.readouterr().err
    )


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a column that only the reward reads": (
        lambda row: {**row, "hint": "other"},
        "other columns of their rows differ",
    ),
    "answers": (lambda row: {**row, "answer": row["answer"] + 1}, "their answers"),
    "prompts": (lambda row: {**row, "question": "1" + row["question"]}, "their prompts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_other_tasks_are_refused_with_what_differs(folder: Path, what: str) -> None:
    change, said = CHANGES[what]
    write_inputs(folder, rows=[change(row) for row in ROWS])
    message = refusal(folder)
    assert "was trained on other training tasks: " in message and said in message
    assert "Restore the dataset" in message


@pytest.mark.slow
def test_fewer_heldout_tasks_are_refused(folder: Path) -> None:
    assert "there were" in refusal(folder, data__heldout=9)


@pytest.mark.slow
def test_heldout_tasks_alone_count_too(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    heldout = [{"question": f"{i}-1=", "answer": i - 1} for i in range(2, 6)]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in heldout))
    assert train(tmp_path, run__steps=1, data__heldout_split=path) == 0
    path.write_text("".join(json.dumps({**row, "answer": 0}) + "\n" for row in heldout))
    assert "other held-out tasks: their answers" in refusal(tmp_path, data__heldout_split=path)


TEMPLATE = (
    "{% if day is not defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}{% for m in"
    " messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Writes the date as Llama 3.2 does, in the letters of the tiny model."""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_template_with_todays_date_is_refused_on_another_day_unless_it_is_given_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    today = datetime(2026, 11, 3)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(today.year, today.month, today.day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    write_inputs(tmp_path)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    same: dict[str, Any] = {"run__steps": 1, "model__chat_template": tmp_path / "t.jinja"}
    assert train(tmp_path, **same) == 0
    assert train(tmp_path, resume=True, **same) == 0  # on the same day
    today = datetime(2026, 11, 4)
    message = refusal(tmp_path, **same)
    assert (
        "the tokens of their prompts differ" in message
        and "model.template_args" in message
        and "Restore the dataset" not in message
    )
    assert "the tokens of their prompts differ" in refusal(
        tmp_path, **same, model__template_args="day=04"
    )
    assert (
        train(tmp_path, resume=True, **{**same, "run__steps": 2}, model__template_args='day="03"')
        == 0
    )
    assert "resuming with changed settings: " in capsys.readouterr().err
    today = datetime(2026, 11, 5)
    assert (
        main(["train", "--resume", str(tmp_path / "r"), "--run.steps", "3"]) == 0
    )  # the run keeps what it was given


@pytest.mark.slow
def test_another_template_is_refused_for_what_it_writes(folder: Path) -> None:
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}+{% endfor %}")
    assert "the tokens of their prompts differ" in refusal(
        folder, model__chat_template=folder / "t.jinja"
    )


@pytest.mark.slow
def test_another_rewards_code_is_said_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(folder, reward=REWARD + "# a comment\n")
    assert train(folder, resume=True, run__steps=3) == 0
    assert "WARNING: the code of" in capsys.readouterr().err
    assert train(folder, resume=True, run__steps=4) == 0
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.slow
def test_metrics_cut_before_the_checkpoint_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "r" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    assert train(folder, resume=True, run__steps=3) == 0
    assert "ends at step 1, but the checkpoint is of step 2" in capsys.readouterr().err


@pytest.mark.slow
def test_metrics_that_are_gone_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "r" / "metrics.jsonl").unlink()
    assert train(folder, resume=True, run__steps=3) == 0
    assert "ends at step 0, but the checkpoint is of step 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"eval__solved_at": 0.5}, {"eval__metric": "reward", "environment__weights": "[2.0]"}],
)
def test_another_measure_of_heldout_tasks_is_refused(folder: Path, change: dict[str, Any]) -> None:
    """summary.json would compare a share of answers with mine >= 1 to one with mine >= 0.5, and
    call both the second.
    """
    message = refusal(folder, run__steps=3, **change)
    assert "mine >= 1" in message and "eval.metric" in message and "sixfold eval" in message


@pytest.mark.slow
def test_a_folder_with_an_added_adapter_falls_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max((folder / "r" / "checkpoints").iterdir())
    (newest / "model" / "adapter_config.json").write_text("{}")
    assert train(folder, resume=True) == 0
    said = capsys.readouterr().err
    assert (
        "adapter_config.json" in said
        and "from step-000000" in said
        and (newest.parent / f"damaged-{newest.name}").is_dir()
    )


@pytest.mark.slow
def test_resume_without_a_checkpoint_starts_over_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    assert train(tmp_path) == 0
    for path in ("checkpoints", "rollouts"):
        shutil.rmtree(tmp_path / "r" / path)
    for path in ("metrics.jsonl", "summary.json"):
        (tmp_path / "r" / path).unlink()
    assert train(tmp_path, resume=True) == 0
    assert "from the start: it has no checkpoint yet" in capsys.readouterr().err


def test_eval_of_a_damaged_checkpoint_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max((folder / "r" / "checkpoints").iterdir())
    weights = newest / "model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    assert main(["eval", str(folder / "r" / "recipe.toml"), "--checkpoint", str(newest)]) == 2
    assert "sha256 mismatch" in capsys.readouterr().err
