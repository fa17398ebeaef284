"""TRL's side of `trainer.py`: `trl.GRPOTrainer` on given completions.

Runs under the python of `.venv-trl`, where Sixfold is not installed. Only generation is replaced:
everything after it is TRL's own loop (micro-batches, loss, backward, clipping, optimizer).
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from side_process import emit
from trainer_job import LORA_SCALE, Job, Meter
from transformers import TrainerCallback


def padded(rows: list[list[Any]], fill: float, dtype: torch.dtype, left: bool) -> torch.Tensor:
    """Pad rows of different lengths to one [B, T] tensor."""
    longest = max(map(len, rows))
    return torch.tensor(
        [
            [fill] * (longest - len(row)) + row if left else row + [fill] * (longest - len(row))
            for row in rows
        ],
        dtype=dtype,
    )


def given_batch(job: Job) -> dict[str, torch.Tensor]:
    """The job's batch, in the form that TRL's generation returns."""
    prompts = [p for p, group in zip(job.prompts, job.completions, strict=True) for _ in group]
    texts = [text for group in job.completions for text in group]
    rewards = torch.tensor(job.rewards)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = centred / (rewards.std(1, correction=0, keepdim=True) + 1e-6)
    completion_mask = padded([[1] * len(t) for t in texts], 0, torch.int64, left=False)
    return {
        "prompt_ids": padded(prompts, 0, torch.int64, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], 0, torch.int64, left=True),
        "completion_ids": padded(texts, 0, torch.int64, left=False),
        "completion_mask": completion_mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
        "old_per_token_logps": padded(
            [row for group in job.logp for row in group], 0.0, torch.float32, left=False
        ),
    }


class GivenCompletions(trl.GRPOTrainer):
    """TRL's trainer, which trains on given completions instead of generating some."""

    def __init__(self, job: Job, meter: Meter, **settings: Any) -> None:
        super().__init__(**settings)
        self.given, self.meter = given_batch(job), meter

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.given)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.meter.grad_norm = float(norm)
        return norm


class StepClock(TrainerCallback):
    """Measures every optimizer step."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.end()


def configure(job: Job, steps: int, output_dir: str) -> trl.GRPOConfig:
    """Settings of TRL's trainer for the job."""
    trajectories = sum(map(len, job.completions))
    return trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=trajectories // job.rows,
        num_generations=len(job.completions[0]),
        max_completion_length=job.longest,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=job.checkpointing == "full",
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def adapter(rank: int) -> Any:
    """Configuration of adapters of this rank, or None if it is 0."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=int(LORA_SCALE * rank),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def score_completions_only() -> None:
    """Run the head on completions only, as TRL does where it has Triton. On a CPU, TRL otherwise
    runs the head on prompts and padding too.
    """
    trl.trainer.utils._use_triton = lambda device: True


def main(path: str, scores_completions_only: bool) -> None:
    """Run the job in the file at `path`.

    Args:
        path: job file.
        scores_completions_only: run the head on completions only.
    """
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    if scores_completions_only:
        score_completions_only()
    meter = Meter(job.steps)
    rows = [{"prompt": "w2"}] * (len(job.prompts) * meter.steps)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GivenCompletions(
            job,
            meter,
            model=job.model,
            args=configure(job, meter.steps, output_dir),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list(rows),
            peft_config=adapter(job.lora_rank),
            callbacks=[StepClock(meter)],
        )
        parameters = list(trainer.model.parameters())
        emit(
            "start",
            side="trl",
            versions={
                "trl": trl.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            parameters=sum(p.numel() for p in parameters),
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], "completions" in sys.argv[2:])
