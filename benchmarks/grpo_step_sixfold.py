"""Sixfold's side of `grpo_step.py`: runs one job file through the library's own controller and
roles, and prints the lines the harness reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from grpo_step import Job, reward
from side_process import emit

import sixfold
from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, Metrics
from sixfold.checks.environment import Environment
from sixfold.controller.collector import Collector
from sixfold.controller.loop import Controller
from sixfold.engine.engine import Engine
from sixfold.event_loop import EventLoop
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, TrainerConfig
from sixfold.reference.frozen import FrozenReference, NoReference
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, Player
from sixfold.sync.sync import SharedSync
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, SamplingParams, Task

MICROBATCH_TOKENS = 2048  # activations of a micro-batch then stay in the processor's caches


def checked(completion: str, task: Task) -> float:
    """The job's reward, as Sixfold calls it."""
    return reward(completion)


def build(job: Job) -> Controller:
    """The six roles for the job."""
    policy = load_policy(ModelConfig(path=job.model), seed=job.seed, device="cpu")
    tasks = [Task(row["id"], row["prompt"]) for row in job.read_prompts()]
    renderer = Renderer(policy.tokenizer)
    trajectories = job.prompts_per_step * job.samples_per_prompt
    longest = max(len(renderer.encode(t)) for t in tasks) + job.max_new_tokens
    engine = Engine(
        CausalLM(policy.model), kv_tokens=trajectories * (longest + 16), max_running=trajectories
    )
    config = TrainerConfig(
        learning_rate=job.learning_rate, max_tokens_per_microbatch=MICROBATCH_TOKENS
    )
    scoring = Scoring(chunk=MICROBATCH_TOKENS)
    trainer = Trainer(PolicyRoot(policy.model), config, scoring, job.steps)
    sampling = SamplingParams(job.max_new_tokens, stop_token_ids=tuple(job.stop_token_ids))
    reference = (
        FrozenReference(policy.model, scoring, MICROBATCH_TOKENS, True)
        if job.beta
        else NoReference()
    )
    clock = time.perf_counter()

    def log(step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
        nonlocal clock
        now = time.perf_counter()
        lengths = [t.sampled_length for g in groups for t in g.trajectories]
        seconds = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
        emit(
            "step",
            side="sixfold",
            step=step - 1,
            seconds=now - clock,
            completion_tokens=lengths,
            **{"roles": seconds},
        )
        clock = time.perf_counter()

    versions = {
        "sixfold": sixfold.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    emit(
        "start",
        side="sixfold",
        versions=versions,
        parameters=sum(p.numel() for p in policy.model.parameters()),
    )
    player = Player(EngineGenerator(engine, renderer), renderer, Limits(longest))
    return Controller(
        collector=Collector(
            Driver(player, sampling, job.samples_per_prompt), Environment([checked]), EventLoop()
        ),
        reference=reference,
        algorithm=make_algorithm(replace(ZOO["grpo"], beta=job.beta), job.max_new_tokens),
        trainer=trainer,
        sync=SharedSync(policy.model, engine),
        tasks=lambda step: tasks[(step - 1) * job.prompts_per_step : step * job.prompts_per_step],
        seed=lambda step: job.seed + step,
        log=log,
    )


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(str(Path(path)))
    torch.set_num_threads(job.threads)
    build(job).run(until=lambda step, metrics: step >= job.steps)


if __name__ == "__main__":
    main(sys.argv[1])
