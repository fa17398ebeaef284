"""Sixfold's side of `trainer.py`: the library's trainer on given completions."""

from __future__ import annotations

import sys

import torch
import transformers
from side_process import emit
from trainer_job import LORA_SCALE, Job, Meter

import sixfold
from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, collate
from sixfold.model.loading import load_policy, origin_of
from sixfold.recipe.schema import LoraConfig, ModelConfig, TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory


def given_batch(job: Job) -> Batch:
    """The job's batch, scored."""
    groups = []
    columns = zip(job.prompts, job.completions, job.logp, job.rewards, strict=True)
    for number, (prompt, texts, logp, rewards) in enumerate(columns):
        name = f"task-{number}"
        rows = [
            Trajectory.one_turn(
                name, k, prompt, text, logp[k], [0] * len(text), "stop", reward=Reward(rewards[k])
            )
            for k, text in enumerate(texts)
        ]
        groups.append(Group(Task(name, ""), rows))
    return collate(groups)


def adapter(job: Job) -> LoraConfig:
    """Settings of the adapters."""
    if not job.lora_rank:
        return LoraConfig()
    return LoraConfig(rank=job.lora_rank, alpha=LORA_SCALE * job.lora_rank)


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    model = ModelConfig(path=job.model, lora=adapter(job))
    policy = load_policy(model, seed=0, device="cpu")
    if job.lora_rank:
        policy = policy.with_lora(model, origin_of(job.model, ""), seed=0)
    method = make_algorithm(ZOO["grpo"], job.longest)
    meter = Meter(job.steps)
    config = TrainerConfig(
        learning_rate=job.learning_rate,
        # As many tokens as TRL's micro-batch.
        max_tokens_per_microbatch=job.rows * (max(map(len, job.prompts)) + job.longest),
        activation_checkpointing=job.checkpointing,
    )
    trainer = Trainer(PolicyRoot(policy.model), config, Scoring(), meter.steps)
    parameters = list(policy.model.parameters())
    emit(
        "start",
        side="sixfold",
        versions={
            "sixfold": sixfold.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameters=sum(p.numel() for p in parameters),
    )
    batch = method.prepare(given_batch(job))
    for _ in range(meter.steps):
        with meter.measured():
            learned = trainer.learn(batch, method.compute_loss)
            meter.grad_norm = learned.grad_norm or 0.0


if __name__ == "__main__":
    main(sys.argv[1])
