"""Sixfold's side of `sft_step.py`: `sixfold train` on a recipe with one stage, and a clock around
each step.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import transformers
from sft_job import Job, fill_adapter
from side_process import emit
from trainer_job import Meter

import sixfold
from sixfold.batch import Batch, Loss
from sixfold.recipe.toml import parse_staged
from sixfold.stages.driver import train_stages
from sixfold.stages.supervised import SupervisedLoop
from sixfold.trainer.learned import Learned
from sixfold.trainer.trainer import Trainer


def recipe_of(job: Job, steps: int, folder: str, kind: str) -> str:
    """The job as a recipe with one stage.

    Args:
        job: the job.
        steps: steps of the stage.
        folder: where the run is written.
        kind: kind of the stage, which is also the name of its section.
    """
    adapter = f"{{rank = {job.lora_rank}, alpha = {job.lora_alpha}}}" if job.lora_rank else "{}"
    return f"""
run.name = "{kind}"
run.dir = {folder!r}
run.device = "cpu"
run.threads = {job.threads}
model.path = {job.model!r}
model.lora = {adapter}
data.source = {job.rows!r}
data.heldout = 0
checkpoint.every = 0
eval.every = 0

[[stages]]
kind = "{kind}"
{kind}.steps = {steps}
{kind}.examples_per_step = {job.rows_per_step}
{kind}.learning_rate = {job.learning_rate!r}
{kind}.warmup_steps = 0
{kind}.schedule = "{job.schedule}"
{kind}.weight_decay = {job.weight_decay!r}
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
        if not meter.step:
            fill_adapter(trainer.model)
        learned = learn(trainer, batch, loss)
        meter.grad_norm = learned.grad_norm or 0.0
        counts.update(trained=int(batch.mask.sum()), tokens=int(batch.lengths.sum()))
        return learned

    SupervisedLoop._step, Trainer.learn = measured, observed  # type: ignore[method-assign,assignment]


def train(path: str, kind: str, changes: str = "") -> None:
    """Run the job in the file at `path`.

    Args:
        path: job file.
        kind: kind of the stage.
        changes: lines that are added to the recipe.
    """
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
        recipe = recipe_of(job, meter.steps, folder, kind) + changes
        train_stages(parse_staged(recipe, "the job"))


if __name__ == "__main__":
    train(sys.argv[1], "sft")
