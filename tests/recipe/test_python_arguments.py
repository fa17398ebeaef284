"""Wrong arguments of `sixfold.train` end in one UserError that names the argument and a remedy,
before anything is written.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from tests.run.processes import tiny_recipe

import sixfold
from sixfold.data.task_set import given_tasks
from sixfold.errors import RunFailed, UserError
from sixfold.recipe.dump import flat
from sixfold.recipe.python_arguments import python_words, setting_flags
from sixfold.recipe.toml import parse_recipe
from sixfold.types import Task

TASK = Task("0", "2+2=", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": 42}, r"reward = 42 .*f\(completion, task\)"),
        ({"reward": "math"}, r"settings=\{'environment.rewards': \['math'\]\}"),
        ({"reward": lambda x: 1.0}, "cannot be called with a completion and a task"),
        ({"algorithm": object()}, "algorithm is of type object: .*prepare"),
        ({"algorithm": dict}, "algorithm is the class dict"),
        ({"algorithm": "grpo"}, r"settings=\{'algorithm.name': 'grpo'\}"),
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": 42}, r"tasks is of type int: .*sixfold.Task\(id="),
        ({"tasks": "train.jsonl"}, "tasks is of type str: .*data.source"),
        ({"tasks": {"prompt": "2+2="}}, "tasks is of type dict"),
        (
            {"tasks": [{"prompt": "2+2=", "answer": 4}]},
            r"tasks\[0\] is of type dict: .*sixfold.Task\(id=",
        ),
        ({"tasks": [TASK], "heldout": 0.1}, "heldout is of type float"),
        ({"tasks": [TASK], "heldout": [{}]}, r"heldout\[0\] is of type dict"),
        ({"heldout": [TASK]}, "heldout is given without tasks"),
        ({"tasks": [TASK, TASK]}, "duplicate id '0'"),
        ({"tasks": [Task("", "q")]}, r"tasks\[0\] has the id ''"),
        ({"tasks": [Task(None, "q")]}, r"tasks\[0\] has the id None"),  # type: ignore[arg-type]
        ({"tasks": [Task("\ud800", "q")]}, r"tasks\[0\].id holds a lone surrogate"),
        ({"tasks": [Task("0", " ")]}, r"tasks\[0\] has an empty prompt"),
        ({"tasks": [Task("0", 7)]}, r"tasks\[0\].prompt is of type int"),  # type: ignore[arg-type]
        ({"tasks": [Task("0", ["hello"])]}, r"tasks\[0\].prompt: a message is"),
        # type: ignore[arg-type]
        ({"resume": True, "overwrite": True}, "give one of them"),
        ({"recipe": {"run.name": "x"}}, "recipe is of type dict"),
        ({"recipe": None}, "recipe is of type NoneType"),
        ({"settings": [("run.name", "x")]}, "settings is not a dictionary"),
        ({"settings": {"run.name": None}}, r"settings\['run.name'\] is None: leave it out"),
        ({"settings": {"run": {"name": "x"}}}, r"settings=\{'run.name': ...\}"),
        ({"settings": {"run.name": object()}}, r"settings\['run.name'\] is of type object"),
        ({"settings": {"run.nam": "x"}}, r"unknown key 'run.nam'.*settings\['run.nam'\]"),
        (
            {"settings": {"run.steps": "ten"}},
            r"run.steps: expected an integer .*settings\['run.steps'\]",
        ),
    ],
)
def test_one_line_that_names_the_argument(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        sixfold.train(**arguments)
    assert "\n" not in str(caught.value) and "--" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_settings_may_be_paths_and_numbers_of_numpy() -> None:
    settings = {
        "model.path": Path("models/tiny"), "data.source": Path("a, b.jsonl"),
        "run.seed": numpy.int64(3),
        "trainer.learning_rate": numpy.float64(1e-4),
        "environment.rewards": [Path("rewards.py:f"), "math"], "data.answer_after": "--",
        "engine.release_kv": numpy.bool_(True),
    }  # fmt: skip
    values = flat(parse_recipe('run.name = "r"', "test", setting_flags(settings)))
    assert (
        values["model.path"] == "models/tiny"
        and values["data.source"] == "a, b.jsonl"
        and values["data.answer_after"] == "--"
    )
    assert (
        values["run.seed"] == 3
        and values["trainer.learning_rate"] == 1e-4
        and values["engine.release_kv"] is True
    )
    assert values["environment.rewards"] == ("rewards.py:f", "math")


def test_errors_speak_of_arguments_and_not_of_flags() -> None:
    with pytest.raises(UserError) as caught, python_words():
        raise UserError(
            "runs/my-run already holds a run (step 3): use --resume runs/my-run, --overwrite, or"
            " another --run.name"
        )
    assert (
        str(caught.value)
        == "runs/my-run already holds a run (step 3): use resume=True, overwrite=True, or another"
        " settings['run.name']"
    )
    with pytest.raises(UserError, match=r"^go on with resume=True, or without$"), python_words():
        raise UserError("go on with --resume, or without")


def test_a_run_that_failed_names_the_call() -> None:
    with pytest.raises(RunFailed) as caught, python_words():
        raise RunFailed(
            "training has diverged. The last good state is step-000002; go on with: sixfold train"
            " --resume my runs/r"
        )
    assert str(caught.value).endswith("go on with: sixfold.train(..., resume=True)")


@pytest.mark.slow
def test_a_finished_run_names_the_setting_and_an_interrupted_one_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = parse_recipe(
        'run.name = "r"', "test", tiny_recipe(tmp_path, run__name="r", run__steps=1, sft__steps=1)
    )
    sixfold.train(recipe)
    sixfold.train(recipe, resume=True)
    assert "resume with a larger settings['run.steps']" in " ".join(capsys.readouterr().err.split())

    def stopped(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("sixfold.run.start.check_same", stopped)
    with pytest.raises(KeyboardInterrupt):
        sixfold.train(recipe, resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "go on with: sixfold.train(..., resume=True)" in said and "--resume" not in said


def test_windows_is_refused_from_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sixfold.api.os", SimpleNamespace(name="nt"))
    with pytest.raises(UserError, match="WSL"):
        sixfold.train()


def test_messages_may_be_a_list_and_ids_numbers() -> None:
    (task,) = given_tasks([Task(numpy.int64(7), [{"role": "user", "content": "2+2="}])], []).train  # type: ignore[arg-type]
    assert task.id == "7" and task.prompt == ({"role": "user", "content": "2+2="},)
