"""A stage that trains a process reward model, and a stage whose steps it rewards."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForTokenClassification, AutoTokenizer

from sixfold.checkpoint.model_source import model_folder
from sixfold.data.step_labels import LabelledSolution
from sixfold.errors import UserError
from sixfold.files.folder import model_stage
from sixfold.recipe.toml import parse_staged
from sixfold.reward_model.step_model import load_step_model
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.stages.driver import train_stages
from sixfold.stages.plans import stage_plans
from sixfold.stages.step_examples import joined
from sixfold.types import Message, Task
from tests.stages.staged_runs import flags, result

TEXT = """\
run.name = "p"

[[stages]]
kind = "prm"
name = "judge"
data.source = "SOLUTIONS"
data.heldout = 16
prm.steps = 40
prm.learning_rate = 5e-3
prm.warmup_steps = 0
prm.examples_per_step = 16
prm.separator = " "
prm.ends = "token: "

[[stages]]
kind = "rl"
name = "rl"
run.steps = 2
data.heldout = 8
environment.rewards = ["prm:stage:judge"]
algorithm.advantage = "process"
"""


def rows() -> list[dict[str, Any]]:
    """Solutions of digits, of which the even ones are right."""
    draw = random.Random(0)
    found = []
    for _ in range(96):
        steps = [draw.randrange(10) for _ in range(draw.randrange(1, 4))]
        found.append(
            {
                "prompt": f"{draw.randrange(10)}+{draw.randrange(10)}=",
                "completions": [f"{n}" for n in steps],
                "labels": [n % 2 == 0 for n in steps],
            }
        )
    return found


def recipe(place: Path, text: str = TEXT, **overrides: Any) -> Any:
    file = place / "solutions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows())))
    given = flags(place, checkpoint__every=20, **overrides)
    at = given.index("--data.heldout")  # the stage has its own
    made = text.replace("SOLUTIONS", str(file))
    return parse_staged(made, "p.toml", given[:at] + given[at + 2 :])


@pytest.mark.slow
def test_a_process_reward_model_is_learned_resumed_and_used(tmp_path: Path) -> None:
    assert train_stages(recipe(tmp_path)) == 0
    run = tmp_path / "p"
    whole = result(run)
    last = whole["judge"]["metrics"][-1]
    assert last["prm/heldout_accuracy"] == 1.0 and last["heldout/loss"] < 0.2
    assert last["prm/heldout_first_error_f1"] == 1.0

    folder = model_folder(str(run), reward_model=True)
    model = load_step_model(folder, "auto", "cpu")
    assert model.name == "sixfold" and model.ends == "token: "
    scores = ProcessScorer(model, 4096).score(Task("t", "3+4="), ["2 3 4"], [[2, 4, 5]])[0]
    assert scores[0] > 0.8 and scores[1] < 0.2 and scores[2] > 0.8
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    assert loaded.config.num_labels == 2 and AutoTokenizer.from_pretrained(folder)

    rewarded = whole["rl"]["metrics"][-1]
    assert rewarded["reward/part/prm.steps"] >= 1
    assert 0 <= rewarded["reward/part/prm.min"] <= 1

    # A stage without an artifact goes on from its checkpoint, and everything comes out the same.
    for name, newest in (("judge", "step-000040"), ("rl", "step-000002")):
        stage = run / "stages" / name
        for file in ("artifact.json", "summary.json"):
            (stage / file).unlink()
        shutil.rmtree(stage / "checkpoints" / newest)
    assert train_stages(recipe(tmp_path), resume=run) == 0
    assert result(run) == whole


def test_a_prefill_that_the_first_step_repeats_stands_once() -> None:
    for prefill, text in (("2+", "2 3"), ("2+ ", "2 3"), ("9", "2+2 3")):
        prompt = [Message(role="user", content="1="), Message(role="assistant", content=prefill)]
        task = LabelledSolution(
            "t", prompt, form="continued", steps=("2+2", "3"), labels=(1.0, 0.0)
        )
        assert joined(task, " ") == (text, [len(text) - 1, len(text)])


def test_recipes_of_process_reward_models_that_are_refused(tmp_path: Path) -> None:
    for old, new, message in (
        ("prm:stage:judge", "stage:judge", r"a process reward model\. Write 'prm:stage:judge'"),
        ("prm:stage:judge", "prm:stage:other", "no earlier stage has this name"),
        ('kind = "prm"', 'kind = "sft"', "prm.steps belongs to stages of kind prm"),
        ("prm.steps = 40", "", r"prm\.steps is 0, .* or prm\.epochs"),
        ('data.source = "SOLUTIONS"', "", "generates tasks, which have no solutions with labelled"),
    ):
        with pytest.raises(UserError, match=message):
            recipe(tmp_path, TEXT.replace(old, new))
    with pytest.raises(UserError, match=r"prm\.ends: steps 'every:0': .* at least 1"):
        stage_plans(recipe(tmp_path, TEXT.replace('"token: "', '"every:0"')), "p.toml")
    staged = recipe(tmp_path)
    assert stage_plans(staged, "p.toml").keys() == {"judge", "rl"}
    bound = staged.stages[1].bound({"judge": "/made/judge"})
    assert bound.environment.rewards == ("prm:/made/judge",)


def test_the_reward_model_of_the_asked_kind_is_taken(tmp_path: Path) -> None:
    for kind in ("reward_model", "prm"):
        folder = tmp_path / "stages" / kind
        folder.mkdir(parents=True)
        (folder / "artifact.json").write_text(json.dumps({"made": "reward_model", "kind": kind}))
    tables = "".join(f"[[stages]]\nname = {kind!r}\n" for kind in ("reward_model", "prm"))
    (tmp_path / "recipe.toml").write_text(tables)
    for kind in ("reward_model", "prm"):
        assert model_stage(tmp_path, ["reward_model"], [kind]).name == kind
    with pytest.raises(UserError, match="has made a other yet"):
        model_stage(tmp_path, ["reward_model"], ["other"])
