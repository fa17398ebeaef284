"""Sixfold's side of `engine.py`: the embedded engine through its generator, as rollout uses it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
import transformers
from engine_job import Answer, Ask, Job, serve

import sixfold
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.types import SamplingParams

SETTINGS: dict[str, Any] = {
    "precision": "float32",
    "block_size": 64,
    "prefix_cache": "radix",
    "prefill_tokens": 4096,
}
AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16}


class Sixfold:
    """Every sequence may run at once, and the cache holds them all."""

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        work = job.conversations()
        rooms = [
            sum(map(len, c.turns)) + sum(lengths[s] for lengths in c.lengths)
            for c in work
            for s in range(len(c.lengths[0]))
        ]
        policy = load_policy(ModelConfig(path=job.model), seed=0, device="cpu")
        kv_tokens = sum(rooms) + 2 * settings["block_size"] * len(rooms)
        options = {name: value for name, value in settings.items() if name != "precision"}
        self.engine = Engine(
            CausalLM(policy.model),
            kv_tokens=kv_tokens,
            max_running=len(rooms),
            autocast=AUTOCAST[settings["precision"]],
            **options,
        )
        self.generator = EngineGenerator(self.engine, Renderer(policy.tokenizer))

    def begin(self, greedy: bool) -> None:
        self.temperature = 0.0 if greedy else 1.0
        self.engine.prefixes.clear()

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        return asyncio.run(self._answer(asks))

    async def _answer(self, asks: list[Ask]) -> list[list[Answer]]:
        async def sampled(ask: Ask, sample: int, length: int) -> Sampled:
            params = SamplingParams(length, self.temperature)
            return await self.generator.generate(ask.prompt, params, SampleKey(ask.key, sample))

        calls = [[sampled(ask, k, length) for k, length in enumerate(ask.lengths)] for ask in asks]
        found = await asyncio.gather(*(asyncio.gather(*row) for row in calls))
        return [[Answer(s.tokens, s.logp) for s in row] for row in found]


def main(path: str) -> None:
    """Run the job in the file at `path`."""
    job = Job.load(path)
    torch.set_num_threads(job.threads)
    settings = SETTINGS | job.settings
    versions = {
        "sixfold": sixfold.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    serve(job, Sixfold(job, settings), versions, settings)


if __name__ == "__main__":
    main(sys.argv[1])
