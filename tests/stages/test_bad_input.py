"""Stages refuse bad input: one line that names the stage and the setting, and nothing is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sixfold.commands import train
from sixfold.errors import UserError

HEAD = """\
run.name = "p"
run.device = "cpu"
run.threads = 1
data.heldout = 4
data.arithmetic = {terms = 2, digits = 1}
environment.preflight = 0
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 4}

[model.scratch]
hidden_size = 8
layers = 1
heads = 1
kv_heads = 1
head_dim = 8
intermediate_size = 8
context = 64

"""
SFT = '[[stages]]\nkind = "sft"\nsft.steps = 1\nsft.examples_per_step = 2\n'
RL = '[[stages]]\nkind = "rl"\nrun.steps = 1\n'
PRETRAIN = '[[stages]]\nkind = "pretrain"\npretrain.steps = 1\npretrain.examples_per_step = 2\n'
SAMPLE = '[[stages]]\nkind = "sample"\nsample.samples = 1\n'
CHAT = SFT + 'data.source = "chat.jsonl"\ndata.heldout = 1\n'
USER = {"role": "user", "content": "1+1="}
REPLY = {"role": "assistant", "content": "2"}


def rows(*found: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


def distinct(count: int) -> str:
    users = ({**USER, "content": f"{i}+1="} for i in range(count))
    return rows(*({"messages": [user, REPLY]} for user in users))


def pairs(count: int) -> str:
    return rows(*({"prompt": f"{i}+1=", "completion": "2"} for i in range(count)))


def chats(*messages: object, count: int = 3) -> str:
    return rows(*({"messages": [*messages]} for _ in range(count)))


BAD: dict[str, tuple[str, dict[str, str], str]] = {
    "a solution beyond the limit": (
        SFT + "sft.max_tokens = 5\n",
        {},
        "the prompt and its solution have .* tokens, but only 5 fit",
    ),
    "a later stage": (SFT + 'model = "stage:rl"\n' + RL, {}, "'sft': model.path = 'stage:rl': no"),
    "an unknown stage": (SFT + RL + 'reference.path = "stage:stf"', {}, "Did you mean 'sft'"),
    "its own artifact": (SFT + 'model = "stage:sft"', {}, "cannot use its own artifact"),
    "a model as dataset": (SFT + RL + 'data.source = "stage:sft"', {}, "takes a dataset"),
    "a dataset as model": (SFT + SAMPLE + RL + 'model = "stage:sample"', {}, "takes a model"),
    "a stage as split": (SFT + RL + 'data.split = "stage:sft"', {}, "cannot name a stage"),
    "an unknown kind": ('[[stages]]\nkind = "rlhf"', {}, "unknown kind 'rlhf'"),
    "no steps": ('[[stages]]\nkind = "sft"', {}, "'sft': sft.steps is 0"),
    "a section of another kind": (SFT + "pretrain.steps = 3", {}, "stages of kind pretrain"),
    "an adapter of random weights": (SFT + "model.lora.rank = 2", {}, "'sft': model.lora"),
    "a trained tokenizer in SFT": (
        SFT + 'model.scratch.tokenizer = "trained"',
        {},
        "'sft': model.scratch.tokenizer",
    ),
    "a model folder that is missing": (SFT + 'model.path = "./none"', {}, "'sft': .*none"),
    "a run that is missing": (RL + 'reference.path = "./none"\nalgorithm.beta = 0.1', {}, "none"),
    "another tokenizer of the reference": (
        SFT
        + '[[stages]]\nkind = "sft"\nname = "b"\nsft.steps = 1\n'
        + 'model = {path = "", scratch.alphabet = "0123456789+=;#-"}\n'
        + RL
        + 'reference.path = "stage:sft"\nalgorithm.beta = 0.1',
        {},
        "'rl': reference.path.*(tokenizer|vocabulary)",
    ),
    "no data file": (CHAT, {}, "'sft': .*chat.jsonl"),
    "an empty data file": (CHAT, {"chat.jsonl": ""}, "'sft': .*chat.jsonl"),
    "broken JSON": (CHAT, {"chat.jsonl": '{"messages": [\n'}, r"'sft': chat.jsonl:1"),
    "an unknown column": (CHAT, {"chat.jsonl": rows({"text": "a"})}, "no columns of a convers"),
    "no reply": (CHAT, {"chat.jsonl": chats(USER)}, r"chat.jsonl:1: .*data.unanswered"),
    "no reply in any row": (
        CHAT + 'data.unanswered = "drop"',
        {"chat.jsonl": chats(USER)},
        "0 usable rows",
    ),
    "all replies masked": (
        CHAT,
        {"chat.jsonl": chats(USER, {**REPLY, "weight": 0})},
        r"chat.jsonl:1: ",
    ),
    "chat without a template": (
        CHAT + 'model.chat_template = "none"',
        {"chat.jsonl": distinct(3)},
        "'sft': .*model.chat_template",
    ),
    "conversations that are too long": (
        CHAT + "sft.max_tokens = 3\ndata.overlong = 'drop'",
        {"chat.jsonl": distinct(3)},
        "no training conversation is left",
    ),
    "one conversation that is too long": (
        CHAT + "sft.max_tokens = 3\ndata.overlong = 'error'",
        {"chat.jsonl": pairs(5)},
        "only 3 fit",
    ),
    "all rows held out": (
        CHAT.replace("heldout = 1", "heldout = 9"),
        {"chat.jsonl": pairs(5)},
        "data.heldout",
    ),
    "characters that the tokenizer lacks": (
        CHAT,
        {
            "chat.jsonl": rows(
                {"prompt": "ü", "completion": "2"}, {"prompt": "1", "completion": "1"}
            )
        },
        "'sft': .*tokenizer does not know",
    ),
    "more SFT tasks than there are": (SFT + "sft.tasks = 9999", {}, "'sft': sft.tasks = 9999"),
    "a text shorter than a window": (
        PRETRAIN + 'data.source = "t.txt"\npretrain.window = 60',
        {"t.txt": "a cat"},
        "'pretrain': .*pretrain.window",
    ),
    "a window longer than the context": (
        PRETRAIN + 'data.source = "t.txt"\npretrain.window = 999',
        {"t.txt": "a cat " * 99},
        "'pretrain': pretrain.window = 999",
    ),
    "an empty text": (PRETRAIN + 'data.source = "t.txt"', {"t.txt": ""}, "'pretrain': .*t.txt"),
    "no text": (PRETRAIN + 'data.source = "t.txt"', {}, "'pretrain': .*t.txt"),
    "no column of texts": (
        PRETRAIN + 'data.source = "t.jsonl"',
        {"t.jsonl": rows({"body": "a cat"})},
        "'pretrain': t.jsonl:1: .*text",
    ),
    "more sampled tasks than there are": (
        SAMPLE + "sample.tasks = 9999",
        {},
        "'sample': sample.tasks = 9999",
    ),
    "nothing kept": (SAMPLE + "sample.tasks = 2", {}, "'sample': .*sample.min_rows"),
    "no file to mix": (
        SAMPLE + 'sample.mix = [{source = "none.jsonl"}]',
        {},
        "'sample': .*none.jsonl",
    ),
    "a reward that does not exist": (RL + 'environment.rewards = ["arithmetc"]', {}, "Did you me"),
}


BEGUN = ("another tokenizer of the reference", "nothing kept")
"""Cases that are found when stages have begun: they can be resumed."""


def refused(*words: str) -> str:
    """The message of `sixfold train`, which is one line."""
    with pytest.raises(UserError) as error:
        train.run(words)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, files, said = BAD[case]
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "p.toml").write_text(HEAD + stages)
    message = refused("p.toml")
    assert re.search(said, message), message
    assert not (tmp_path / "runs" / "p").exists() or case in BEGUN


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_of_a_finished_stage_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders and recipes that were changed by hand are refused, and the rest stays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(HEAD + SFT + RL + "rollout.max_new_tokens = 5\n")
    assert train.run(["p.toml"]) == 0
    run, first = tmp_path / "runs" / "p", tmp_path / "runs" / "p" / "stages" / "sft"
    assert "already holds a run" in refused("p.toml")
    assert "no stage 'rll'. Did you mean 'rl'?" in refused("p.toml", "--only", "rll")
    changed = ("p.toml", "--from", "rl", "--stages.sft.sft.learning_rate", "0.1")
    assert "'sft' is finished, but its settings have changed" in refused(*changed)
    assert "is a stage of runs/p" in refused("--resume", "runs/p/stages/sft")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace('name = "sft"', 'name = "tuned"'))
    assert "model.path 'stage:sft' -> 'stage:tuned'" in refused("--resume", "runs/p")
    (run / "recipe.toml").write_text(recipe)
    moved = first.rename(tmp_path / "sft")
    assert "stage 'sft' has not finished" in refused("p.toml", "--only", "rl")
    assert train.run(["--resume", "runs/p"]) == 0  # made again, with the same bytes
    artifacts = [json.loads((folder / "artifact.json").read_bytes()) for folder in (moved, first)]
    assert artifacts[0] == artifacts[1]
    model = next((first / "checkpoints").glob("*/model"))
    hidden = model.rename(tmp_path / "model")
    assert re.search("'rl': .*sft.checkpoints", refused("p.toml", "--from", "rl"))
    hidden.rename(model)
    assert train.run(["p.toml", "--from", "rl"]) == 0
