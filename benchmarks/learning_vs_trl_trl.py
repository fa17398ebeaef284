"""TRL's side of `learning_vs_trl.py`: trains one job's base with `trl.GRPOTrainer` and keeps its
samples, and its weights at every checkpoint.

    python learning_vs_trl_trl.py JOB.json

Runs under the python of `.venv-trl`, where Sixfold is not installed; the harness puts Sixfold's
source on the path, for the job and for the reward, which need nothing but the standard library.
Prints one JSON object for each step, a `StepRecord`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from learning_vs_trl import SAMPLES_PER_PROMPT, TEMPERATURE, Job, StepRecord
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Task

# trajectories in one forward and backward; TRL's loss is the same for any, as long as all are equal
MICROBATCH = 32


def configure(job: Job) -> trl.GRPOConfig:
    """The job in TRL's words: GRPO as Sixfold computes it, as far as settings go (README.md says
    where they end).
    """
    return trl.GRPOConfig(
        output_dir=str(job.trl),
        use_cpu=True,
        bf16=False,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=job.prompts_per_step * SAMPLES_PER_PROMPT // MICROBATCH,
        num_generations=SAMPLES_PER_PROMPT,
        num_iterations=1,
        max_completion_length=job.max_new_tokens,
        temperature=TEMPERATURE,
        # its sampler then walks the tasks in the file's order, which is the order Sixfold trains
        # them in
        shuffle_dataset=False,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        importance_sampling_level="token",
        vllm_importance_sampling_correction=False,
        learning_rate=job.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Recorder(TrainerCallback):
    """The reward as TRL calls it, and a callback: between them they see all that a `StepRecord`
    holds.
    """

    __name__ = "arithmetic"  # TRL names its metrics after the reward function

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tasks: list[str] = []
        self.prompts: list[Any] = []
        self.completions: list[list[int]] = []
        self.rewards: list[float] = []
        self.learning_rate = 0.0
        self.clock = 0.0

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        id: list[str],
        answer: list[int],
        **_: Any,
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [
            arithmetic_reward(text, Task(name, "", right))
            for text, name, right in zip(texts, id, answer, strict=True)
        ]
        self.tasks, self.prompts, self.completions, self.rewards = (
            id,
            prompts,
            completion_ids,
            rewards,
        )  # one call a step, with all its rows
        return rewards

    def on_train_begin(
        self, *_: Any, model: PreTrainedModel, processing_class: PreTrainedTokenizerBase, **__: Any
    ) -> None:
        self._save(0, model, processing_class)
        self.clock = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        self.learning_rate = optimizer.param_groups[0]["lr"]

    def on_step_end(
        self,
        _args: Any,
        state: TrainerState,
        *_: Any,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase,
        **__: Any,
    ) -> None:
        seconds = time.perf_counter() - self.clock
        prompts = processing_class.apply_chat_template(
            self.prompts[::SAMPLES_PER_PROMPT],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        record = StepRecord(
            step=state.global_step,
            tasks=self.tasks[::SAMPLES_PER_PROMPT],
            prompts=prompts,
            learning_rate=self.learning_rate,
            reward=sum(self.rewards) / len(self.rewards),
            length=sum(map(len, self.completions)) / len(self.completions),
            samples=len(self.rewards),
            seconds=seconds,
        )
        print(json.dumps(asdict(record)), flush=True)
        with self.job.trl_samples.open("a") as file:
            file.write(
                json.dumps(
                    {"tasks": self.tasks, "completions": self.completions, "rewards": self.rewards}
                )
                + "\n"
            )
        if state.global_step in self.job.checkpoints:
            self._save(state.global_step, model, processing_class)
        self.clock = time.perf_counter()

    def _save(self, step: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        folder = self.job.trl / f"step-{step:06d}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(Path(path))
    torch.set_num_threads(1)
    recorder = Recorder(job)
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in job.read_tasks()
    ]
    trainer = trl.GRPOTrainer(
        model=str(job.base),
        args=configure(job),
        reward_funcs=recorder,
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
