"""SFT with the loss on the replies alone, and on every token: the same rows, steps and seeds.

    python benchmarks/prompt_mask.py [--seeds 3] [--steps 600]

Rows are sums of five numbers with their steps, as pairs of prompt and completion. Both stages
start from the same random weights. Prints held-out accuracy and the held-out loss of the replies.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import sixfold
from sixfold.environment.arithmetic import arithmetic_tasks

HELDOUT = 500
STAGE = """
[[stages]]
kind = "sft"
name = "{name}"
model.path = ""
data.source = "{rows}"
data.heldout = 100
sft.form = "prompt_completion"
sft.train_on = "{name}"
sft.steps = {steps}
"""
RECIPE = """
[run]
name = "mask-{seed}"
dir = "{folder}"
seed = {seed}
threads = 1

[model.scratch]
architecture = "minigpt"
alphabet = "0123456789+=;#"
hidden_size = 64
layers = 3
heads = 4
initializer_range = 0.05
context = 64

[data]
source = "arithmetic"
limit = 2000
heldout = {heldout}

[data.arithmetic]
terms = 5
digits = 1
trace = "running"

[environment]
rewards = ["worked_sum"]

[sft]
examples_per_step = 32
learning_rate = 2e-3

[rollout]
max_new_tokens = 32

[eval]
every = 0
"""


def write_rows(path: Path, seed: int) -> None:
    """All sums of five digits as pairs. The stages leave out those that are held out."""
    tasks = arithmetic_tasks(2000, terms=5, digits=1, seed=seed, trace="running")
    rows = [{"prompt": task.prompt, "completion": task.trace} for task in tasks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            rows = Path(folder) / f"rows-{seed}.jsonl"
            write_rows(rows, seed)
            recipe = Path(folder) / f"mask-{seed}.toml"
            recipe.write_text(
                RECIPE.format(seed=seed, folder=folder, heldout=HELDOUT)
                + "".join(
                    STAGE.format(name=name, rows=rows, steps=given.steps)
                    for name in ("assistant", "all")
                )
            )
            run = sixfold.train(str(recipe))
            for row in json.loads((Path(run) / "stages.json").read_bytes()):
                print(
                    f"seed {seed}  train_on = {row['stage']:<10} held-out {row['heldout']:.1%}"
                    f"  loss of held-out rows {row['loss']:.4f}"
                )


if __name__ == "__main__":
    main()
