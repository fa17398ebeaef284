"""Time of searches that run at the same time, beside the same searches one after another.

    python benchmarks/search_at_once.py [--tasks 16] [--budget 1000]

A policy and a process reward model of 0.8 million parameters with random weights, as
`recipes/prm_search.toml` has them, in one thread each. Both ways must find the same at the same
cost in tokens. Seconds are of all threads of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, load_policy
from sixfold.model.scalar_head import scalar_head
from sixfold.recipe.schema import (
    ModelConfig,
    ProcessScoringConfig,
    RewardScoringConfig,
    ScratchConfig,
)
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.step_model import step_model_of
from sixfold.reward_model.step_reward import load_process_scorer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Stepping, search
from sixfold_search.shared_scorer import SharedScorer
from sixfold_search.task_search import Found

METHODS = ("greedy", "majority", "best_of_n", "beam")
TOKENS = 48


class Searches:
    """Searches with one engine and one scorer."""

    def __init__(self, policy: Policy, scorer: ProcessScorer, budget: int) -> None:
        self.engine = Engine(CausalLM(policy.model), kv_tokens=256 * 64)
        self.renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        self.generator = EngineGenerator(self.engine, self.renderer)
        self.params = SamplingParams(TOKENS, stop_token_ids=policy.stop_token_ids, seed=1)
        self.scorer, self.budget, self.thread = scorer, budget, ThreadPoolExecutor(1)

    async def of(self, task: Task, method: str) -> Found:
        return await search(
            self.generator,
            self.renderer,
            task,
            method=method,
            params=self.params,
            stepping=Stepping("token:;"),
            scorer=SharedScorer(self.scorer, self.thread),
            budget=self.budget,
        )

    async def one_by_one(self, tasks: Sequence[Task], method: str) -> list[Found]:
        return [await self.of(task, method) for task in tasks]

    async def at_once(self, tasks: Sequence[Task], method: str) -> list[Found]:
        return await asyncio.gather(*(self.of(task, method) for task in tasks))


def load(folder: Path) -> tuple[Policy, ProcessScorer]:
    """The policy, and a reward model with its body."""
    scratch = ScratchConfig(
        architecture="minigpt",
        alphabet="0123456789+=;#",
        context=64,
        hidden_size=128,
        layers=4,
        heads=4,
    )
    policy = load_policy(ModelConfig(scratch=scratch), seed=0, device="cpu")
    model = step_model_of(policy, policy.model, "token:;")
    torch.nn.init.normal_(scalar_head(model).weight, std=0.5)
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    settings = ProcessScoringConfig(), RewardScoringConfig()
    return policy, load_process_scorer([str(folder)], *settings, "the benchmark")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--budget", type=int, default=1000, help="model tokens of a search")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        searches = Searches(*load(Path(folder)), given.budget)
    sums = [(n % 9, n % 7, n % 5) for n in range(given.tasks)]
    tasks = [Task(f"t{n}", "+".join(map(str, one)) + "=") for n, one in enumerate(sums)]
    searches_of = {"one by one": searches.one_by_one, "at once": searches.at_once}
    wait_for(searches.at_once(tasks[:1], "best_of_n"))  # kernels are compiled before
    print(f"{'':12}{'CPU s':>24}{'wall s':>24}{'engine steps':>24}{'tokens':>10}")
    print(f"{'':12}" + "".join(f"{name:>12}" for name in [*searches_of] * 3))
    for method in METHODS:
        cpu, wall, steps, found = [], [], [], []
        for run in searches_of.values():
            before = searches.engine.stats.steps
            began, ran = time.process_time(), time.perf_counter()
            found.append(wait_for(run(tasks, method)))
            cpu.append(time.process_time() - began)
            wall.append(time.perf_counter() - ran)
            steps.append(searches.engine.stats.steps - before)
        if found[0] != found[1]:
            raise SystemExit(f"{method}: the results differ")
        figures = [f"{one:>12.1f}" for one in (*cpu, *wall)] + [f"{one:>12,}" for one in steps]
        tokens = sum(one.cost.total for one in found[0])
        print(f"{method:12}{''.join(figures)}{tokens:>10,}", flush=True)
    searches.generator.close()


if __name__ == "__main__":
    main()
