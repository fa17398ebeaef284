"""Sixfold's part of `learning_vs_trl.py` besides training: it writes the tasks for TRL, and
evaluates the weights of both sides.

    python learning_vs_trl_evaluate.py tasks JOB.json       # the job's tasks file
    python learning_vs_trl_evaluate.py evaluate JOB.json    # needs what all sides left

`evaluate` prints {"record": StepRecord} for each of Sixfold's steps, then {"side", "step",
"accuracy"} for all weights that were kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from learning_vs_trl import SAMPLES_PER_PROMPT, SIDES, Job, StepRecord
from transformers import AutoModelForCausalLM

from sixfold.controller.stream import TaskStream
from sixfold.data.sources import load_tasks
from sixfold.evaluation.evaluate import evaluate
from sixfold.files.folder import RunFolder
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import load_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.assemble import Assembly, assemble


def write_tasks(job: Job, recipe: Recipe) -> None:
    """The tasks of all steps in the order in which `sixfold train` takes them."""
    train = load_tasks(recipe.data, seed=recipe.run.seed, rewards=recipe.environment.rewards).train
    stream = TaskStream(train, job.prompts_per_step, recipe.run.seed)
    rows = [
        {"id": t.id, "prompt": t.prompt, "answer": t.answer}
        for step in range(1, job.steps + 1)
        for t in stream(step)
    ]
    job.tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(job: Job) -> Iterator[StepRecord]:
    """Records of Sixfold's run, step by step, from its folder."""
    run = RunFolder(Path(job.folder, "sixfold"))
    for line in run.metrics.read_text().splitlines():
        metrics = json.loads(line)
        rows = read_rollouts(run.rollout_file(metrics["step"]))
        first = rows[::SAMPLES_PER_PROMPT]
        yield StepRecord(
            step=metrics["step"],
            tasks=[row["task_id"] for row in first],
            prompts=[row["tokens"][: row["prompt_length"]] for row in first],
            learning_rate=metrics["train/learning_rate"],
            reward=sum(row["reward"]["value"] for row in rows) / len(rows),
            length=sum(len(row["tokens"]) - row["prompt_length"] for row in rows) / len(rows),
            samples=len(rows),
            seconds=metrics["time/total_s"],
        )


def accuracy(assembly: Assembly, weights: Path) -> float:
    """Share of the held-out tasks that these weights solve greedily."""
    assembly.policy.model.load_state_dict(
        AutoModelForCausalLM.from_pretrained(weights).state_dict()
    )
    assembly.sync.refresh()
    tasks = assembly.tasks.heldout
    found = evaluate(assembly.evaluator(), assembly.environment, tasks, seed=0, loop=assembly.loop)
    return found.interval.mean


def main(verb: str, path: str) -> None:
    """Run one of the two verbs on the job in the file at `path`."""
    job = Job.load(Path(path))
    recipe = load_recipe("demo", job.flags())
    if verb == "tasks":
        write_tasks(job, recipe)
        return
    torch.set_num_threads(1)
    for record in records(job):
        print(json.dumps({"record": asdict(record)}), flush=True)
    assembly = assemble(recipe, str(job.base))
    for side in (*SIDES, "replay"):
        for step in job.checkpoints[
            side == "replay" :
        ]:  # the replay starts from the base that both sides start from
            print(
                json.dumps(
                    {
                        "side": side,
                        "step": step,
                        "accuracy": accuracy(assembly, job.weights(side, step)),
                    }
                ),
                flush=True,
            )
    assembly.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
