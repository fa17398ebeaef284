"""TRL's side of `train.py`: `trl.GRPOTrainer` on given completions.

Only generation is replaced. Micro-batches, loss, backward, clipping and optimizer are TRL's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from shapes import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from training_job import Job
from transformers import PreTrainedTokenizerFast


def trl_update(name: str, job: Job, device: torch.device) -> Callable[[], object]:
    """Make a function that makes one update."""
    model = make_model(name, device, torch.float32)
    model.set_attn_implementation("sdpa")
    folder = tempfile.mkdtemp()
    trainer = _GivenCompletions(
        job,
        model=model,
        args=_config(job, device, folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(job.prompts)),
        processing_class=_tokenizer(),
    )
    if job.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.create_optimizer()
    # `train` does the same. With bf16 it makes the forward pass run under autocast.
    model = trainer.accelerator.prepare(model.train())
    parts = trainer.micro_batches(device)
    trainer.current_gradient_accumulation_steps = len(parts)

    def update() -> None:
        for part in parts:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, part)
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return update


class _GivenCompletions(trl.GRPOTrainer):
    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(**settings)
        self.job = job

    def micro_batches(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """Padded micro-batches of the job's rows, each with at most `job.microbatch` tokens."""
        job = self.job
        prompts = [p for p, group in zip(job.prompts, job.completions, strict=True) for _ in group]
        texts = [text for group in job.completions for text in group]
        rewards = torch.tensor(job.rewards)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, correction=0, keepdim=True) + 1e-6)).flatten()
        size = max(1, job.microbatch // (len(prompts[0]) + job.longest))
        made = []
        for a in range(0, len(texts), size):
            longest = max(map(len, texts[a : a + size]))
            rows = [t + [0] * (longest - len(t)) for t in texts[a : a + size]]
            seen = [[1] * len(t) + [0] * (longest - len(t)) for t in texts[a : a + size]]
            ids = torch.tensor(prompts[a : a + size], device=device)
            made.append(
                {
                    "prompt_ids": ids,
                    "prompt_mask": torch.ones_like(ids),
                    "completion_ids": torch.tensor(rows, device=device),
                    "completion_mask": torch.tensor(seen, device=device),
                    "advantages": advantages[a : a + size].to(device),
                    "num_items_in_batch": torch.tensor(job.sampled, device=device),
                }
            )
        return made


def _config(job: Job, device: torch.device, folder: str) -> trl.GRPOConfig:
    samples = len(job.completions[0])
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        bf16=job.bfloat16,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=len(job.prompts),
        num_generations=samples,
        max_completion_length=job.longest,
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,  # TRL's default; `trl_update` switches it on
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
