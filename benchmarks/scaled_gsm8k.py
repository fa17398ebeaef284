"""The gsm8k recipe scaled down to a CPU: a tiny chat model and word problems in GSM8K's form.

The recipe needs a GPU, a model and a dataset of the hub. This module makes a copy of each:

- a dataset folder with the splits train and test, and GSM8K's columns: `question`, and `answer`
  that ends in `#### N`;
- a chat model with random weights that `sixfold sft` has taught to answer about a third of them,
  with the answer in a box, as an instruct model does.

Everything else is the recipe's own: system prompt, `math` reward in worker processes, `####`
answers, checkpointing of activations, GRPO.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from sixfold.environment.arithmetic import worked_trace

TRAIN, TEST = 4000, 300

STORIES = (
    "A shop sold {a} pens on Monday and {b} on Tuesday. How many pens did it sell?",
    "Mara picked {a} plums and Jo picked {b}. How many plums have they together?",
    "A bus drove {a} km in the morning and {b} km later. How far did it drive?",
    "Tom saved {a} dollars. Then he earned {b} more. How many dollars has he now?",
)

SMALL = [
    *("--run.device", "cpu", "--run.precision", "float32", "--run.steps", "250"),
    *("--data.subset", "", "--data.max_prompt_tokens", "200", "--rollout.max_new_tokens", "40"),
    *("--rollout.prompts_per_step", "32", "--environment.workers", "1", "--eval.every", "25"),
    *("--trainer.learning_rate", "2e-4", "--trainer.schedule", "linear"),
]
"""Flags that scale the recipe down. A tiny model takes a larger learning rate than one of the hub.
"""

SFT_RECIPE = """
[run]
name = "model"
[model.scratch]
alphabet = '''{alphabet}'''
context = 256
[data]
source = "{folder}/traces.jsonl"
heldout = 100
trace_field = "trace"
system_prompt = '''{system}'''
[environment]
rewards = ["math"]
preflight = 0
[rollout]
max_new_tokens = 40
[sft]
steps = 800
examples_per_step = 32
learning_rate = 2e-3
stop_at_accuracy = 0.3
"""


def make_dataset(folder: Path) -> Path:
    """Write word problems of two addends below 100; no pair of addends is in both splits.

    Returns:
        A dataset folder with train.jsonl and test.jsonl, which `data.source` takes.
    """
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], TRAIN + TEST)
    dataset = folder / "word-problems"
    dataset.mkdir(parents=True)
    _write(dataset / "train.jsonl", [_row(pair, rng) for pair in pairs[:TRAIN]])
    _write(dataset / "test.jsonl", [_row(pair, rng) for pair in pairs[TRAIN:]])
    return dataset


def write_sft_recipe(folder: Path, dataset: Path, system_prompt: str) -> Path:
    """Write the recipe that teaches the base model, and its worked solutions.

    Args:
        folder: where the recipe and traces.jsonl go.
        dataset: the folder that `make_dataset` returned; only its training split is read.
        system_prompt: that of the gsm8k recipe.
    """
    rows = [json.loads(line) for line in (dataset / "train.jsonl").read_text().splitlines()]
    traced = []
    for row in rows:
        steps, _, answer = row["answer"].partition("\n#### ")
        trace = f"{steps} \\boxed{{{answer}}}"
        traced.append({"question": row["question"], "answer": answer, "trace": trace})
    _write(folder / "traces.jsonl", traced)
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    alphabet = alphabet.replace("'", "")
    recipe = folder / "base.toml"
    recipe.write_text(SFT_RECIPE.format(alphabet=alphabet, folder=folder, system=system_prompt))
    return recipe


def _row(addends: tuple[int, int], rng: random.Random) -> dict[str, str]:
    question = rng.choice(STORIES).format(a=addends[0], b=addends[1])
    steps = worked_trace(addends).partition("#")[0]
    return {"question": question, "answer": f"{steps}\n#### {sum(addends)}"}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
