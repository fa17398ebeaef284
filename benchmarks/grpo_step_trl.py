"""TRL's side of `grpo_step.py`: runs one job file with `trl.GRPOTrainer` and prints the lines that
the harness reads.

Runs under the python of `.venv-trl`, where Sixfold is not installed. TRL's settings are the fastest
found for it on this job (which
were tried: README.md), and differ from its defaults in no number that the job fixes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_step import Job, reward
from side_process import emit
from transformers import TrainerCallback

MICROBATCH = 8  # trajectories in one forward and backward


def configure(job: Job, output_dir: str) -> trl.GRPOConfig:
    """The job in TRL's words."""
    trajectories = job.prompts_per_step * job.samples_per_prompt
    # TRL cuts completions at the tokenizer's end-of-sequence token whatever the stop ids are, so
    # where nothing stops a completion that
    # token must never be sampled: min_new_tokens gives it probability 0 up to the cap.
    never_stop = {"min_new_tokens": job.max_new_tokens}
    return trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=trajectories // MICROBATCH,
        num_generations=job.samples_per_prompt,
        max_completion_length=job.max_new_tokens,
        generation_kwargs=None if job.stop_token_ids else never_stop,
        temperature=1.0,
        shuffle_dataset=False,
        beta=job.beta,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        # TRL's default recomputes every activation: a third more work for memory that this job has
        gradient_checkpointing=False,
        model_init_kwargs={"attn_implementation": "sdpa"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Lengths:
    """The reward, as TRL calls it; keeps the length of every completion that it is shown since
    `take`.
    """

    __name__ = "reward"  # TRL names its metrics after the function

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        self.seen += [len(ids) for ids in completion_ids]
        return [reward(text) for text in completions]

    def take(self) -> list[int]:
        """The lengths since the last call."""
        seen, self.seen = self.seen, []
        return seen


class StepClock(TrainerCallback):
    """Prints a `step` line at the end of every optimizer step: the time since the last one ended,
    data loading and all.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.last = 0.0
        self.step = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        emit(
            "step",
            side="trl",
            step=self.step,
            seconds=now - self.last,
            completion_tokens=self.lengths.take(),
        )
        self.last = now
        self.step += 1


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    lengths = Lengths()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = trl.GRPOTrainer(
            model=job.model,
            args=configure(job, output_dir),
            reward_funcs=lengths,
            train_dataset=Dataset.from_list(job.read_prompts()),
            callbacks=[StepClock(lengths)],
        )
        versions = {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        emit(
            "start",
            side="trl",
            versions=versions,
            parameters=sum(p.numel() for p in trainer.model.parameters()),
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
