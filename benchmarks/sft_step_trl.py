"""TRL's side of `sft_step.py`: `trl.SFTTrainer` with its own loop.

Runs under the python of `.venv-trl`, where Sixfold is not installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
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


def configure(job: Job, mode: str, output_dir: str) -> trl.SFTConfig:
    """Settings of TRL's trainer for the job.

    Args:
        job: the job.
        mode: padded, flat (no padding: the rows of a micro-batch in one) or packed.
        output_dir: folder that TRL may write to.
    """
    # A packed row has as many tokens as fit into `longest`, so fewer of them make a micro-batch.
    packs = max(1, job.micro_tokens // job.longest)
    micro = packs if mode == "packed" else job.micro_rows
    return trl.SFTConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        num_train_epochs=1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=1 if mode == "packed" else job.rows_per_step // micro,
        train_sampling_strategy="sequential",
        max_length=None if mode == "flat" else job.longest,
        assistant_only_loss=True,
        padding_free=mode == "flat",
        packing=mode == "packed",
        learning_rate=job.learning_rate,
        lr_scheduler_type=job.schedule,
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_epsilon=job.epsilon,
        weight_decay=job.weight_decay,
        max_grad_norm=job.grad_clip,
        # TRL's default recomputes every activation: a third more work
        gradient_checkpointing=False,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Measured(trl.SFTTrainer):
    """TRL's trainer. Reports loss and gradient norm of every step, and decays every weight, as
    Sixfold does; by default norms and biases are left out.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        steps = -(-len(self.get_train_dataloader()) // self.args.gradient_accumulation_steps)
        self.meter = Meter(steps - 1)
        self._sums = [0.0, 0.0, 0.0]

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        trained = int((inputs["labels"] != -100).sum())
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        loss = super().compute_loss(model, inputs, *args, **settings)
        for at, value in enumerate((float(loss.detach()), trained, tokens)):
            self._sums[at] += value
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.meter.grad_norm = float(norm)
        return norm

    def report(self) -> None:
        """Print the line `loss` of a step. The loss of a micro-batch is its part of the mean."""
        loss, trained, tokens = self._sums
        emit("loss", loss=loss, trained=int(trained), tokens=int(tokens))
        self._sums = [0.0, 0.0, 0.0]


class StepClock(TrainerCallback):
    """Measures every optimizer step."""

    trainer: Measured

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.meter.end()
        self.trainer.report()


def main(path: str, mode: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.ordered).read_text().splitlines()]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output_dir:
        clock.trainer = Measured(
            model=job.model,
            args=configure(job, mode, output_dir),
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
