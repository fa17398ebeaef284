"""The task that every algorithm runs alone on: one-digit sums, a tiny model made from nothing, a few seconds of SFT, then RL.

    python -m sixfold.algorithm.grpo

Here and nowhere else in this room the whole loop is put together, so that an algorithm's file can be tried out by itself in about a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from ..batch import collate
from ..config import ModelConfig, ScratchConfig, TrainerConfig
from ..controller.stream import TaskStream, step_seed
from ..engine.engine import Engine
from ..environment.arithmetic import arithmetic_reward, arithmetic_tasks
from ..model.loading import load_policy
from ..reference.frozen import FrozenReference, NoReference
from ..rollout.engine_rollout import EngineRollout
from ..rollout.prompts import PromptCodec
from ..sync.sync import SharedSync
from ..trainer.logprobs import Scoring
from ..trainer.sft import example, sft_batch, sft_loss
from ..trainer.trainer import Trainer
from ..types import Group, Reward, SamplingParams, Task
from .base import Algorithm
from .table import ZOO
from .composed import make_algorithm

MODEL = ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=", hidden_size=64, layers=2, heads=2, head_dim=32, intermediate_size=128))
COMPLETION_TOKENS = 4
SFT_STEPS = 160
PROMPTS, SAMPLES = 16, 16


@dataclass
class SharedTask:
    """An algorithm at work on the task. ema: moving average of the mean reward, from the first step's."""

    algorithm: Algorithm
    seed: int = 0
    sft_steps: int = SFT_STEPS
    ema: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        policy = load_policy(MODEL, seed=self.seed, device="cpu")
        self._codec = PromptCodec(policy.tokenizer)
        self._model = policy.model
        engine = Engine(policy.model, kv_tokens=PROMPTS * SAMPLES * 32)
        params = SamplingParams(COMPLETION_TOKENS, stop_token_ids=policy.stop_token_ids)
        self._rollout = EngineRollout(engine, self._codec, params, SAMPLES)
        self._sync = SharedSync(policy.model, engine)
        tasks = [replace(t, trace=None) for t in arithmetic_tasks(55, terms=2, digits=1, seed=self.seed)]  # the bare answer
        self._stream = TaskStream(tasks, PROMPTS, self.seed)

    def warm_up(self) -> float:
        """SFT on the answers until some come out right; gives the last loss."""
        trainer = Trainer(self._model, TrainerConfig(learning_rate=2e-3, weight_decay=0.1), Scoring(), self.sft_steps)
        loss = float("nan")
        for step in range(1, self.sft_steps + 1):
            loss = float(trainer.train_step(sft_batch([self._example(t) for t in self._stream(step)]), sft_loss)["train/loss"])  # type: ignore[arg-type]
        return loss

    def steps(self) -> Iterator[float]:
        """RL without end, a step at a time; gives each step's mean reward."""
        trainer = Trainer(self._model, TrainerConfig(learning_rate=1e-3), Scoring(), total_steps=0)
        keeps = self.algorithm.needs_reference
        reference = FrozenReference(self._model, Scoring(), 4096, share_prefix=True) if keeps else NoReference()
        step = 0
        while True:
            step += 1
            groups = self._rollout.generate(self._stream(step), step_seed(self.seed, step))
            mean = _score(groups)
            self.ema = mean if step == 1 else 0.9 * self.ema + 0.1 * mean
            batch = self.algorithm.compute_advantages(reference.score(collate(groups)))
            trainer.train_step(batch, self.algorithm.compute_loss)
            self._sync.sync(trainer.version)
            yield mean

    def _example(self, task: Task) -> Group:
        return example(task, self._codec.encode(task), self._codec.solution(task))


def _score(groups: list[Group]) -> float:
    """Fill in the rewards; their mean."""
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward = Reward(arithmetic_reward(trajectory.text, group.task))
    values = [r for g in groups for r in g.rewards if r is not None]
    return sum(values) / len(values)


def main(name: str, steps: int = 100) -> None:
    """Run the algorithm with its default settings and print how the reward goes up."""
    torch.set_num_threads(1)  # the model is too small for more
    task = SharedTask(make_algorithm(ZOO[name], COMPLETION_TOKENS), sft_steps=SFT_STEPS)
    print(f"{name} on one-digit sums: {SFT_STEPS} steps of SFT ... loss {task.warm_up():.3f}", flush=True)
    for step, reward in zip(range(1, steps + 1), task.steps(), strict=False):
        if step == 1 or step % 10 == 0:
            bar = "#" * round(40 * task.ema)
            print(f"step {step:3d}  reward {reward:.3f}  ema {task.ema:.3f}  {bar}", flush=True)
