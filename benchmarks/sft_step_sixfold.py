"""Sixfold's side of `sft_step.py`: `sixfold train` on a recipe with one stage, and a clock around
each step.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import transformers
from sft_job import Job
from side_process import emit
from trainer_job import Meter

import sixfold
from sixfold.batch import Batch, Loss
from sixfold.recipe.toml import parse_staged
from sixfold.stages.driver import train_stages
from sixfold.stages.supervised import SupervisedLoop
from sixfold.trainer.learned import Learned
from sixfold.trainer.trainer import Trainer


def recipe_of(job: Job, steps: int, folder: str) -> str:
    """The job as a recipe."""
    return f"""
run.name = "sft"
run.dir = {folder!r}
run.device = "cpu"
run.threads = {job.threads}
model.path = {job.model!r}
data.source = {job.rows!r}
data.heldout = 0
checkpoint.every = 0
eval.every = 0

[[stages]]
kind = "sft"
sft.steps = {steps}
sft.examples_per_step = {job.rows_per_step}
sft.learning_rate = {job.learning_rate!r}
sft.warmup_steps = 0
sft.schedule = "{job.schedule}"
sft.weight_decay = {job.weight_decay!r}
trainer.betas = {list(job.betas)!r}
trainer.epsilon = {job.epsilon!r}
trainer.grad_clip = {job.grad_clip!r}
trainer.max_tokens_per_microbatch = {job.micro_tokens}
"""


def measure_steps(meter: Meter) -> None:
    """Measure every step of a supervised stage in this process."""
    make_step, learn = SupervisedLoop._step, Trainer.learn

    def measured(loop: SupervisedLoop, step: int) -> object:
        with meter.measured():
            metrics = make_step(loop, step)
        emit("loss", loss=metrics["train/loss"], **counts)
        return metrics

    counts: dict[str, int] = {}

    def observed(trainer: Trainer, batch: Batch, loss: Loss) -> Learned:
        learned = learn(trainer, batch, loss)
        meter.grad_norm = learned.grad_norm or 0.0
        counts.update(trained=int(batch.mask.sum()), tokens=int(batch.lengths.sum()))
        return learned

    SupervisedLoop._step, Trainer.learn = measured, observed  # type: ignore[method-assign,assignment]


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    meter = Meter(job.steps)
    measure_steps(meter)
    versions = {
        "sixfold": sixfold.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    emit("start", side="sixfold", versions=versions)
    with tempfile.TemporaryDirectory() as folder:
        train_stages(parse_staged(recipe_of(job, meter.steps, folder), "the job"))


if __name__ == "__main__":
    main(sys.argv[1])
