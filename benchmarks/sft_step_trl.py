"""TRL's side of `sft_step.py`: `trl.SFTTrainer` with its own loop.

Runs under the python of `.venv-trl`, where Sixfold is not installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from sft_job import Job
from side_process import emit
from trainer_job import Meter
from transformers import TrainerCallback


def settings(job: Job, output_dir: str, micro_rows: int, rows_per_step: int) -> dict[str, Any]:
    """Settings of all of TRL's trainers.

    Args:
        job: the job.
        output_dir: folder that TRL may write to.
        micro_rows: rows in one forward and backward pass.
        rows_per_step: rows of an optimizer step.
    """
    return {
        "output_dir": output_dir,
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 1,
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows_per_step // micro_rows,
        "train_sampling_strategy": "sequential",
        "max_length": job.longest,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": job.schedule,
        "adam_beta1": job.betas[0],
        "adam_beta2": job.betas[1],
        "adam_epsilon": job.epsilon,
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.grad_clip,
        # TRL's default recomputes every activation: a third more work
        "gradient_checkpointing": False,
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Measured:
    """Mixin for a trainer of TRL. Reports loss and gradient norm of every step, and decays every
    weight, as Sixfold does; by default norms and biases are left out.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        steps = -(-len(self.get_train_dataloader()) // self.args.gradient_accumulation_steps)
        self.meter = Meter(steps - 1)
        self._sums = [0.0, 0.0, 0.0]

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def count(self, inputs: Any) -> tuple[int, int]:
        """Trained tokens and all tokens of a micro-batch, without padding."""
        raise NotImplementedError

    def share(self, loss: float) -> float:
        """What a micro-batch adds to the loss of its step."""
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        counts = self.count(inputs)
        loss = super().compute_loss(model, inputs, *args, **settings)
        for at, value in enumerate((self.share(float(loss.detach())), *counts)):
            self._sums[at] += value
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.meter.grad_norm = float(norm)
        return norm

    def report(self) -> None:
        """Print the line `loss` of a step."""
        loss, trained, tokens = self._sums
        emit("loss", loss=loss, trained=int(trained), tokens=int(tokens))
        self._sums = [0.0, 0.0, 0.0]


class MeasuredSft(Measured, trl.SFTTrainer):
    """TRL's trainer for SFT. The loss of a micro-batch is its part of the mean."""

    def count(self, inputs: Any) -> tuple[int, int]:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        return int((inputs["labels"] != -100).sum()), tokens

    def share(self, loss: float) -> float:
        return loss


class StepClock(TrainerCallback):
    """Measures every optimizer step."""

    trainer: Measured

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.meter.end()
        self.trainer.report()


def train(path: str, make: Callable[..., Measured]) -> None:
    """Run the job in the file at `path`.

    Args:
        path: job file.
        make: makes the trainer from the job, a folder for TRL, and arguments of TRL's constructor.
    """
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.ordered).read_text().splitlines()]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output_dir:
        clock.trainer = make(
            job,
            output_dir,
            model=job.model,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        versions = {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        emit("start", side="trl", versions=versions)
        clock.trainer.train()


def make_sft(mode: str, job: Job, output_dir: str, **arguments: Any) -> MeasuredSft:
    """The trainer of a mode.

    Args:
        mode: padded, flat (no padding: the rows of a micro-batch in one) or packed.
        job: the job.
        output_dir: folder that TRL may write to.
        arguments: of TRL's constructor.
    """
    # A packed row has as many tokens as fit into `longest`, so fewer of them make a micro-batch.
    packs = max(1, job.micro_tokens // job.longest)
    rows = (packs, packs) if mode == "packed" else (job.micro_rows, job.rows_per_step)
    changed = {"max_length": None} if mode == "flat" else {}
    args = trl.SFTConfig(
        **settings(job, output_dir, *rows) | changed,
        assistant_only_loss=True,
        padding_free=mode == "flat",
        packing=mode == "packed",
    )
    return MeasuredSft(args=args, **arguments)


if __name__ == "__main__":
    train(sys.argv[1], partial(make_sft, sys.argv[2]))
