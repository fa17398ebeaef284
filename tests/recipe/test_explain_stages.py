"""`sixfold explain` of a recipe with stages: a block for each, and one stage whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.commands import explain
from sixfold.errors import UserError
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe

TEXT = """\
run.name = "p"

[data]
source = "sums.jsonl"
heldout = 40

[[stages]]
kind = "pretrain"
data.source = "corpus.txt"
pretrain.steps = 10

[[stages]]
kind = "sft"
name = "chat"
data.source = "chat.jsonl"
sft.steps = 20
sft.learning_rate = 2e-4

[[stages]]
kind = "sample"
name = "keepers"
sample.samples = 6

[[stages]]
kind = "sft"
name = "again"
data.source = "stage:keepers"
model = "stage:pretrain"
sft.steps = 30

[[stages]]
kind = "rl"
run.steps = 7
model.lora.rank = 4
reference.path = "stage:chat"
algorithm.beta = 0.1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "p.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(text: str) -> dict[str, dict[str, str]]:
    """Facts of each stage by topic."""
    found = {}
    for block in text.split("\n\n")[1:-1]:
        head, *lines = block.splitlines()
        found[head.split(" ")[1]] = {
            line.split()[0]: line.strip().partition(" ")[2].strip() for line in lines
        }
    return found


def test_the_time_of_a_stage_is_that_of_the_run_of_the_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs/p"
    run.mkdir(parents=True)
    (run / "stages.json").write_text('[{"stage": "chat", "seconds": 83.2}]')
    assert explain.run(["p.toml"]) == 0
    found = blocks(capsys.readouterr().out)
    assert found["chat"]["time"] == "1:23 in runs/p"
    assert found["pretrain"]["time"] == "known after its first steps, or from a run of it"


def test_each_stage_has_its_model_data_loss_steps_and_users(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.run(["p.toml"]) == 0
    text = capsys.readouterr().out
    assert "5 stages, one after the other, in runs/p" in text
    assert "sixfold explain p.toml:rl" in text
    found = blocks(text)
    tasks = "40 tasks set aside from split 'train' of sums.jsonl"
    loss = "the loss of held-out examples"
    assert {name: stage["data"] for name, stage in found.items()} == {
        "pretrain": f"texts of corpus.txt; evaluated on {tasks} and {loss}",
        "chat": f"conversations of chat.jsonl; evaluated on {tasks} and {loss}",
        "keepers": "samples the tasks of sums.jsonl; evaluated on nothing",
        "again": f"worked solutions of the dataset of stage keepers; evaluated on {tasks} and"
        f" {loss}",
        "rl": f"tasks of sums.jsonl; evaluated on {tasks}",
    }
    assert {name: stage["makes"] for name, stage in found.items()} == {
        "pretrain": "a model, for chat, again",
        "chat": "a model, for keepers, rl",
        "keepers": "a dataset, for again",
        "again": "a model, for rl",
        "rl": "an adapter, for no later stage",
    }
    assert [stage["model"].split(";")[0] for stage in list(found.values())[1:]] == [
        "of stage pretrain",
        "of stage chat",
        "of stage pretrain",
        "of stage again, with an adapter of rank 4",
    ]
    assert "tokens in the vocabulary" in found["pretrain"]["model"]
    assert found["chat"]["steps"] == "20 of 64 examples"
    assert found["keepers"]["steps"].startswith("6 completions of each of all tasks")
    assert found["rl"]["reference"] == "of stage chat" and "grpo" in found["rl"]["loss"]
    assert all("cross-entropy" in found[name]["loss"] for name in ("pretrain", "chat", "again"))
    assert "loss" not in found["keepers"] and "checkpoint" not in found["keepers"]["memory"]


def test_memory_is_that_of_the_stages_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explain.run(["p.toml"])
    said = blocks(capsys.readouterr().out)["rl"]["memory"]
    memory = memory_of(make_plan(load_recipe("p.toml:rl")))
    assert memory is not None
    assert f"{memory.needed(memory.cache_wanted) / 1e6:.1f} MB" in said or "GB" in said


def test_a_supervised_stage_says_nothing_of_rl(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explain.run(["p.toml:chat"])
    text = capsys.readouterr().out
    topics = {line.split("  ")[0] for line in text.splitlines() if not line.startswith(" ")}
    assert topics.isdisjoint({"rollout", "algorithm", "reference", "sampling", "ends", "reward"})
    assert {"model", "data", "loss", "steps", "training", "evaluation", "makes"} <= topics
    assert "learning rate 0.0002 (constant, 10 warm-up steps)" in text
    explain.run(["p.toml:rl"])
    text = capsys.readouterr().out
    assert "\nalgorithm " in text and "reference    of stage chat\n" in text
    assert text.startswith("model        of stage again, with an adapter of rank 4;")


def test_passes_and_the_schedule_of_sft_are_those_of_the_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = TEXT.replace("sft.steps = 20", 'sft.epochs = 2\nsft.schedule = "cosine"')
    (folder / "p.toml").write_text(longer)
    explain.run(["p.toml:chat"])
    text = capsys.readouterr().out
    assert "2 passes over the examples, 64 examples at a time" in text
    assert "learning rate 0.0002 (cosine, 10 warm-up steps)" in text


def test_a_prompt_is_shown_of_one_stage(folder: Path) -> None:
    with pytest.raises(UserError, match=r"--render: name a stage, p\.toml:rl"):
        explain.run(["p.toml", "--render"])
