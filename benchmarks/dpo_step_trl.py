"""TRL's side of `dpo_step.py`: `trl.DPOTrainer` with its own loop.

Runs under the python of `.venv-trl`, where Sixfold is not installed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import trl
from sft_job import BETA, Job, fill_adapter
from sft_step_trl import Measured, settings, train
from trainer_trl import adapter, score_completions_only


class MeasuredDpo(Measured, trl.DPOTrainer):
    """TRL's trainer for DPO. The loss of a micro-batch is the mean over its pairs."""

    def count(self, inputs: Any) -> tuple[int, int]:
        return int(inputs["completion_mask"].sum()), int(inputs["attention_mask"].sum())

    def share(self, loss: float) -> float:
        return loss / self.args.gradient_accumulation_steps


def make_dpo(mode: str, job: Job, output_dir: str, **arguments: Any) -> MeasuredDpo:
    """The trainer of a mode.

    Args:
        mode: all (the head runs on all tokens) or completions.
        job: the job.
        output_dir: folder that TRL may write to.
        arguments: of TRL's constructor.
    """
    if mode == "completions":
        score_completions_only()
    common = settings(job, output_dir, job.micro_rows, job.rows_per_step)
    trainer = MeasuredDpo(
        args=trl.DPOConfig(**common, beta=BETA), peft_config=adapter(job.lora_rank), **arguments
    )
    fill_adapter(trainer.model)
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], partial(make_dpo, sys.argv[2]))
